"""The Grok-1 architecture as Haiku modules, its configuration and its partition rules."""

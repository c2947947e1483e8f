"""Native CPU kernels: C++ that XLA calls, and what they need to be built and found."""

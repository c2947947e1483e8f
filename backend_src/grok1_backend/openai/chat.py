"""The prompt of a chat, by a template that the operator gives: the released model has none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grok1_backend.errors import UserError
from grok1_backend.openai.errors import ApiError
from grok1_backend.openai.requests import Message
from grok1_backend.openai.translation import Render


def read_template(path: Path) -> Render:
    """A Jinja2 template of a file.

    It sees `messages`, each with `role`, `content` (a text) and perhaps `name`, and
    `add_generation_prompt`, which is true, and can refuse messages by `raise_exception(reason)`.

    Raises:
      UserError: there is no such file, or it is no template.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    try:
        template = environment.from_string(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"there is no chat template at {path}: {error.strerror}") from None
    except (TemplateError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no Jinja2 template: {error}") from None

    def render(messages: Sequence[Message]) -> str:
        plain = [message.for_template() for message in messages]
        try:
            return template.render(messages=plain, add_generation_prompt=True)
        except TemplateError as error:
            message = f"the chat template refuses the messages: {error}"
            raise ApiError(400, message, param="messages") from None

    return render


def _refuse(reason: str) -> None:
    raise TemplateError(reason)

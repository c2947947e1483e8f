"""The gateway that the tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gateways import Gateway, launch
from openai import OpenAI

from grok1_backend.text.tokenizer import TOKENIZER_FILE, Tokenizer
from servers import EMBEDDED_MODEL

TEMPLATE = """\
{% for message in messages %}
{% if message.role not in ('user', 'assistant') %}
{{ raise_exception('there is no role ' + message.role) }}
{% endif %}
{{ message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}
"""


@pytest.fixture(scope="session")
def gateway(grpc_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """With a chat template."""
    template = tmp_path_factory.mktemp("gateway") / "template.jinja"
    template.write_text(TEMPLATE)
    with launch(grpc_url, "--chat-template", str(template)) as running:
        yield running


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    """The real client, which tries nothing twice."""
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(EMBEDDED_MODEL / TOKENIZER_FILE)

"""Importing lily is light and opens nothing."""

import subprocess
import sys

HEAVY = (
    "huggingface_hub",
    "requests",
    "urllib3",
    "tqdm",
    "socket",
    "httpx",
    "urllib.request",
    "http.client",
    "ssl",
    "asyncio",
    "jinja2",
    "tokenizers",
    "safetensors",
)


def test_import_loads_no_network_template_or_tokenizer_module():
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import lily\n"
        "print(' '.join(set(sys.modules) - before))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    assert "lily._core" in loaded
    assert not [m for m in HEAVY if m in loaded]

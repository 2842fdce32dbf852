"""The text files of a qwen3_5_moe checkpoint: tokenizer, chat template, generation settings.

They behave as those of the released model do, with any byte-level BPE vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tags that a decoder must keep as text are not special.
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
TAGS = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip

# Words with their leading punctuation, single digits, runs of symbols, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = r"""
{%- macro text(content) %}
  {%- if content is string %}{{- content }}
  {%- elif content is iterable %}
    {%- for item in content %}
      {%- if item.type == 'text' %}{{- item.text }}
      {%- else %}{{- raise_exception('only text content is supported') }}
      {%- endif %}
    {%- endfor %}
  {%- endif %}
{%- endmacro %}
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}
  {%- set said = text(m.content) | trim %}
  {%- if m.role == 'user' and not (said.startswith('<tool_response>')
      and said.endswith('</tool_response>')) %}{%- set ns.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if ns.query < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- set system = text(messages[0].content) | trim if messages[0].role == 'system' else '' %}
{%- if tools %}
  {{- '<|im_start|>system\n# Tools\n\nThese functions can be called:\n\n<tools>' }}
  {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
  {{- '\n</tools>\n\nTo call one, end the reply with:\n\n<tool_call>\n<function=NAME>\n' }}
  {{- '<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>' }}
  {{- ('\n\n' + system if system else '') + '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
  {%- set said = text(m.content) | trim %}
  {%- if m.role == 'system' %}
    {%- if not loop.first %}{{- raise_exception('System message must be first.') }}{%- endif %}
  {%- elif m.role == 'user' %}
    {{- '<|im_start|>user\n' + said + '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}
    {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
    {%- if m.reasoning_content is not string and '</think>' in said %}
      {%- set thought = said.split('</think>')[0].split('<think>')[-1] %}
      {%- set said = said.split('</think>')[-1] | trim %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.query or preserve_thinking is true %}
      {{- '<think>\n' + (thought | trim) + '\n</think>\n\n' }}
    {%- endif %}
    {{- said }}
    {%- for call in m.tool_calls or [] %}
      {%- set call = call.function or call %}
      {{- ('' if loop.first and not said else '\n\n' if loop.first else '\n') }}
      {{- '<tool_call>\n<function=' + call.name + '>\n' }}
      {%- for key, value in (call.arguments or {}) | items %}
        {{- '<parameter=' + key + '>\n' }}
        {{- value if value is string else value | tojson }}
        {{- '\n</parameter>\n' }}
      {%- endfor %}
      {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
    {{- '\n<tool_response>\n' + said + '\n</tool_response>' }}
    {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
  {%- else %}
    {{- raise_exception('Unexpected message role.') }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n<think>\n' }}
  {%- if enable_thinking is false %}{{- '\n</think>\n\n' }}{%- endif %}
{%- endif %}
""".lstrip()


def byte_tokens() -> list[str]:
    """The 256 bytes in the printable stand-ins of byte-level BPE."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b if b in shown else next(spare)) for b in range(256)]


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Text:
    """A vocabulary: the BPE's tokens and merges; special tokens and tags come after them."""

    tokens: list[str]
    merges: list[str]

    def token_id(self, token: str) -> int:
        """The id of a special token or tag."""
        return len(self.tokens) + (SPECIAL + TAGS).index(token)

    def tokenizer(self) -> dict[str, Any]:
        """tokenizer.json: byte-level BPE with the family's pipeline and added tokens."""
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": self.token_id(t), "content": t, "single_word": False, "lstrip": False,
                    "rstrip": False, "normalized": False, "special": t in SPECIAL,
                }
                for t in SPECIAL + TAGS
            ],
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated",
                        "invert": False,
                    },
                    byte_level,
                ],
            },
            "post_processor": byte_level,
            "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
                "vocab": {t: i for i, t in enumerate(self.tokens)}, "merges": self.merges,
            },
        }  # fmt: skip

    def write(self, folder: Path, temperature: float = 1.0, top_k: int = 20) -> None:
        """Write the four text files of a checkpoint."""
        end, turn = self.token_id("<|endoftext|>"), self.token_id("<|im_end|>")
        write_json(folder / "tokenizer.json", self.tokenizer())
        write_json(
            folder / "tokenizer_config.json",
            {
                "add_prefix_space": False,
                "bos_token": None,
                "clean_up_tokenization_spaces": False,
                "eos_token": "<|im_end|>",
                "model_max_length": 262144,
                "pad_token": "<|endoftext|>",
                "tokenizer_class": "PreTrainedTokenizerFast",
                "unk_token": None,
            },
        )
        write_json(
            folder / "generation_config.json",
            {
                "bos_token_id": end,
                "do_sample": True,
                "eos_token_id": [turn, end],
                "pad_token_id": end,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": 0.95,
            },
        )
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")

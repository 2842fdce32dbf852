"""A loaded model: text in, sessions and text out."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from lily import _core
from lily.asynchronous import in_thread
from lily.errors import CheckpointError, ContextError
from lily.generation import Generation
from lily.loading import Kv, Precision
from lily.memory import memory_plan
from lily.model_info import ModelInfo
from lily.reuse import Reuse
from lily.sampling import Sampling
from lily.session import Session
from lily.store import ReuseStats, SnapshotStore
from lily.token_ids import token_array
from lily.whole_numbers import check_whole

if TYPE_CHECKING:
    from lily.chat import ChatTemplate, Message
    from lily.chat_reply import Reply, ReplyPiece
    from lily.grammar import Constraint, Format
    from lily.scoring import Ranked, Score
    from lily.tokenizer import StreamDecoder, Tokenizer
    from lily.tool_loop import ToolRun

TURN_START = "<|im_start|>"


class Model:
    """A model on a device. Load it once; any number of sessions, in any threads, may use it."""

    def __init__(
        self,
        engine: _core.Engine,
        info: ModelInfo,
        device: _core.Device,
        tokenizer: Tokenizer | None,
        reuse_memory: int,
    ) -> None:
        self._engine: _core.Engine | None = engine
        self._device: _core.Device | None = device
        self.info = info
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._store = SnapshotStore(reuse_memory)

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str],
        device: str = "auto",
        precision: Precision = "fast",
        kv: Kv | None = None,
        *,
        context: int | None = None,
        threads: int | None = None,
        chunk: int | None = None,
        memory_limit: int | None = None,
        reuse_memory: int | None = None,
        ablate: Sequence[str] = (),
        revision: str | None = None,
        offline: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Self:
        """Load a checkpoint.

        Args:
            source: a folder, or "org/name" on the Hugging Face hub (cached files are used without
                opening a connection).
            device: "auto", "cpu" or "metal".
            precision: "fast" keeps activations in bf16, "float32" everything in float32.
            kv: element type of the KV cache; None is bf16, or float32 with that precision. "int8",
                with either, keeps each head's row of keys or values as int8 with one scale.
            context: tokens of sessions that ask for no other number; None is 32,768, what fits, or
                what the model was trained for, whichever is least.
            threads: of the CPU device; None is one for each physical core.
            chunk: tokens of a prefill pass; None takes the device's choice.
            memory_limit: bytes that weights and one session may take; None is what the device has.
            reuse_memory: bytes for states of earlier prompts, from which later ones that begin
                alike go on; 0 keeps none. None is a quarter of what is left beside the weights and
                one session of the default context, at most 2 GiB.
            ablate: names of `techniques()` that plans shall leave out, to measure their worth.
            revision: branch, tag or commit of a hub checkpoint.
            offline: open no connection.
            progress: called with ("download" or "load", bytes done, bytes in all).

        Raises:
            CheckpointError: the files are missing or wrong; says which and how.
            DeviceError: no such device here, or the model does not fit.
            ContextError: `context` does not fit beside the weights.
            ValueError: an option is out of range.
        """
        from lily.opening import open_model

        return cls(
            *open_model(
                source,
                device,
                precision,
                kv,
                context=context,
                threads=threads,
                chunk=chunk,
                memory_limit=memory_limit,
                reuse_memory=reuse_memory,
                ablate=ablate,
                revision=revision,
                offline=offline,
                progress=progress,
            )
        )

    @classmethod
    async def aload(cls, source: str | os.PathLike[str], **options: Any) -> Self:
        """As `load`, for event loops."""
        return await in_thread(lambda: cls.load(source, **options))

    def without(self, *names: str) -> Model:
        """The same weights, run without some of what makes plans fast: to measure its worth.

        Args:
            names: of `techniques()`.

        Returns:
            A model beside this one; closing either leaves the other.

        Raises:
            ValueError: a name is unknown.
        """
        engine = self._live_engine().without(list(names))
        memory = memory_plan(engine.memory, self.info.config.max_position_embeddings)
        info = replace(self.info, ablated=names, memory=memory)
        device = cast(_core.Device, self._device)
        return Model(engine, info, device, self._tokenizer, self._store.budget)

    def _live_engine(self) -> _core.Engine:
        if self._engine is None:
            raise ValueError("the model is closed")
        return self._engine

    @property
    def sampling(self) -> Sampling:
        """The checkpoint's recommended sampling, used where a call says nothing else."""
        return self.info.sampling

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError if the checkpoint has no tokenizer.json."""
        if self._tokenizer is None:
            raise CheckpointError(f"{self.info.folder}: no tokenizer.json, expected one for text")
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises CheckpointError if the checkpoint has no chat template."""
        if self._template is None:
            from lily.chat import ChatTemplate

            self._template = ChatTemplate.load(self.info.folder)
        return self._template

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a text."""
        own = self._tokenizer.stop_ids if self._tokenizer else frozenset[int]()
        return own | frozenset(self.info.stop_ids)

    @property
    def n_tokens(self) -> int:
        """Token ids are in [0, n_tokens); the model's vocabulary may be padded beyond that."""
        return self._tokenizer.n_tokens if self._tokenizer else self.info.config.vocab_size

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`. With `special`, spellings such as `<|im_end|>` become their tokens;
        otherwise they are ordinary text."""
        return self.tokenizer.encode(text, special=special)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(tokens, skip_special=skip_special)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        **variables: Any,
    ) -> str:
        """The prompt that the checkpoint's own template makes of a conversation, for reading."""
        return self.chat_template.render(
            messages, tools=tools, enable_thinking=thinking, **variables
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of that prompt. Special tokens spelled inside messages stay ordinary text."""
        return self.chat_template.encode_chat(
            self.tokenizer, messages, tools=tools, enable_thinking=thinking, **variables
        )

    def session(self, context: int | None = None) -> Session:
        """A new, empty session.

        Args:
            context: most tokens it will hold; None takes the model's default. Memory for the KV
                cache grows with use.

        Raises:
            ContextError: so much context does not fit in memory.
        """
        if context is None:
            context = self.info.context
        check_whole("context", context, 1, 2**31 - 1)
        session = Session(self, _core.Session(self._live_engine(), context))
        self._sessions.add(session)
        return session

    def load_session(self, path: str | os.PathLike[str], *, context: int | None = None) -> Session:
        """The session that `Session.save` wrote, to go on as it would have; see `Session.load`."""
        return Session.load(path, self, context=context)

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: Sampling | None = None,
        session: Session | None = None,
        progress: Callable[[int, int], None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        special: bool = False,
        format: Format | None = None,
        logprobs: int | None = None,
        reuse: Reuse = "any",
        **options: Any,
    ) -> Generation:
        """Generate text after a prompt.

        Args:
            prompt: text (encoded as it is), token ids, or chat messages for the template.
            max_tokens: most tokens to draw; None goes on to the end of the context.
            stop: strings that end the text; they are never part of it.
            sampling: how to draw; None takes the checkpoint's recommendation.
            session: a session to go on in; None makes one for this call.
            progress: called with (prompt tokens done, prompt tokens in all).
            tools, thinking: for the chat template.
            special: whether spellings of special tokens in a text prompt become those tokens.
            format: what the text must look like: a JSON schema, "json" for any JSON object, a
                `Regex` or a `Grammar`.
            logprobs: tell how likely each token was, beside so many of the likeliest (0…20).
            reuse: where to go on from: "any" takes the longest beginning of the prompt of which
                a state is kept; "exact" only states that prefill alone made, so that the result is
                that of a cold start, token for token; "off" starts cold and keeps nothing.
            options: single sampling options over `sampling`: temperature, top_k, seed, …

        Returns:
            An iterator of `Piece` that also has `text()` and `result()`.

        Raises:
            ValueError: the prompt is empty, an option is unknown or out of range, or the format is
                not valid or not supported.
            ContextError: the prompt is longer than the context.
        """
        tokens = self._prompt_tokens(prompt, tools, thinking, special)
        return self._generation(
            tokens,
            session,
            (sampling or self.sampling).merged(options),
            max_tokens=max_tokens,
            stop=stop,
            progress=progress,
            format=format,
            logprobs=logprobs,
            reuse=reuse,
        )

    def _generation(
        self, prompt: list[int], session: Session | None, sampling: Sampling, **options: Any
    ) -> Generation:
        """A generation in `session`, or in one of its own."""
        own = session is None
        if session is not None and session.model is not self:
            raise ValueError("session: another model's, expected one of this model")
        return Generation(
            self.session() if session is None else session,
            prompt,
            sampling=sampling,
            owns_session=own,
            **options,
        )

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        thinking: bool | int | None = None,
        format: Format | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: Sampling | None = None,
        session: Session | None = None,
        reuse: Reuse = "any",
        logprobs: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Reply:
        """Reply to a conversation.

        Args:
            messages: dicts with "role" and "content", as OpenAI's clients write them; the last is
                usually the user's. `ReplyResult.message()` goes on with it.
            tools: functions that the model may ask for: OpenAI's form, or Python functions.
            tool_choice: "auto", "none", "required", or the name of a tool; None is "auto".
            parallel_tool_calls: whether one reply may hold several calls; otherwise it ends after
                the first.
            thinking: whether to think before the answer, or at most how many tokens; None leaves
                it to the template.
            format: what the answer must be: a JSON schema, "json", `Regex` or `Grammar`. Thinking
                stays free.
            max_tokens: most tokens to draw, thinking included; None goes on to the end of the
                context.
            stop: strings that end the answer; they are never part of it. Not looked for in
                thinking and tool calls.
            sampling: how to draw; None takes the checkpoint's recommendation.
            session: a session to go on in; None makes one for this call.
            reuse: "any" goes on from whatever is remembered, "exact" only from what a cold call
                would compute bit for bit, "off" from nothing.
            logprobs: log probabilities of so many best tokens beside each drawn one.
            progress: called with (prompt tokens done, prompt tokens in all).
            template: further variables of the chat template.
            options: single sampling options over `sampling`: temperature, top_k, seed, …

        Returns:
            An iterator of `ReplyPiece` that also has `text()` and `result()`.

        Raises:
            ValueError: a message, a tool or an option is malformed, unknown or out of range.
            ContextError: the prompt is longer than the context.
        """
        from lily.chat_reply import open_reply

        return open_reply(
            self,
            messages,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            thinking=thinking,
            format=format,
            template=template,
            sampling=(sampling or self.sampling).merged(options),
            session=session,
            max_tokens=max_tokens,
            stop=stop,
            reuse=reuse,
            logprobs=logprobs,
            progress=progress,
        )

    def run_tools(
        self,
        messages: Sequence[Message],
        functions: Sequence[Callable[..., Any]],
        *,
        max_rounds: int = 10,
        on_piece: Callable[[ReplyPiece], object] | None = None,
        **options: Any,
    ) -> ToolRun:
        """Reply to a conversation, calling Python functions that the model asks for.

        Args:
            messages: as `chat` takes them.
            functions: their type hints and docstrings become the tools' schemas. What one returns
                goes to the model as text, JSON if it is no text; so does what it raises.
            max_rounds: most replies; the last may end with calls that nobody has answered.
            on_piece: called with each `ReplyPiece` as it comes.
            options: as `chat` takes them.

        Raises:
            ValueError: as `chat`; or a function's hints have no schema.
        """
        from lily.tool_loop import ToolLoop

        return ToolLoop(self, messages, functions, max_rounds, on_piece, options).run()

    async def agenerate(
        self, prompt: str | Sequence[int] | Sequence[Message], **options: Any
    ) -> Generation:
        """As `generate`, for event loops: `async for piece in await model.agenerate(…)`."""
        return await in_thread(lambda: self.generate(prompt, **options))

    async def achat(self, messages: Sequence[Message], **options: Any) -> Reply:
        """As `chat`, for event loops: `async for piece in await model.achat(…)`."""
        return await in_thread(lambda: self.chat(messages, **options))

    async def arun_tools(
        self,
        messages: Sequence[Message],
        functions: Sequence[Callable[..., Any]],
        *,
        max_rounds: int = 10,
        on_piece: Callable[[ReplyPiece], object] | None = None,
        **options: Any,
    ) -> ToolRun:
        """As `run_tools`, for event loops. Coroutine functions run in the caller's loop, others and
        `on_piece` in another thread."""
        from lily.tool_loop import in_loop

        return await in_loop(self, messages, functions, max_rounds, on_piece, options)

    def score(
        self,
        text: str | Sequence[int],
        *,
        after: str | Sequence[int] = (),
        special: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Score:
        """How likely the model finds a text: the log probability of each token, given those before.

        Args:
            text: text or token ids, at least one token.
            after: text or token ids that come before and are not scored.
            special: whether spellings of special tokens in text become those tokens.
            progress: called with (tokens done, tokens in all).

        Raises:
            ValueError: there is no token, or an id is out of range.
            ContextError: the two together are longer than the model was trained for, or do not fit
                in memory.
        """
        from lily.scoring import score

        ids, before = (
            self.encode(t, special=special) if isinstance(t, str) else t for t in (text, after)
        )
        return score(self, ids, before, progress)

    def rank(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        choices: Sequence[str | Sequence[int]],
        *,
        by: Literal["total", "mean"] = "total",
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        special: bool = False,
    ) -> list[Ranked]:
        """Choices in the order of how likely they are to follow a prompt, best first.

        The prompt is computed once. Each choice is encoded on its own: after a text that ends with
        a letter, choices usually begin with a space.

        Args:
            prompt: as for `generate`.
            choices: texts or token ids, each of at least one token.
            by: rank by the log probability of the whole choice, or by its mean for each token,
                which does not favour short ones.
            tools, thinking, special: as for `generate`.

        Raises:
            ValueError: the prompt, the choices or one of them is empty, or an id is out of range.
            ContextError: prompt and longest choice are longer than the model was trained for, or do
                not fit in memory.
        """
        from lily.scoring import rank

        return rank(self, self._prompt_tokens(prompt, tools, thinking, special), choices, by)

    def reuse_stats(self) -> ReuseStats:
        """What the model keeps of earlier prompts: snapshots, bytes, hits, evictions."""
        return self._store.stats()

    def _prompt_tokens(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool | None,
        special: bool,
    ) -> list[int]:
        """Token ids of a prompt in any of the forms that `generate` takes."""
        if isinstance(prompt, str):
            return self.encode(prompt, special=special)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            return self.encode_chat(
                cast("Sequence[Message]", prompt), tools=tools, thinking=thinking
            )
        return cast("list[int]", token_array(cast("Sequence[int]", prompt)).tolist())

    def _check_prompt(self, n_tokens: int, context: int) -> None:
        """Raise ContextError if a prompt of `n_tokens` does not fit in `context`."""
        if n_tokens > context:
            raise ContextError(f"prompt: {n_tokens} tokens, expected at most {context}")

    def _turn_starts(self, prompt: Sequence[int]) -> list[int]:
        """Where the turns of a chat prompt begin; the last of them is the reply's own."""
        start = self._tokenizer.added_tokens.get(TURN_START) if self._tokenizer else None
        return [i for i, token in enumerate(prompt) if token == start]

    def _constraint(self, format: Format) -> Constraint:
        """A format's constraint on this model's tokens."""
        from lily.grammar import compile_format

        return compile_format(format, self.tokenizer)

    def _stream_decoder(self) -> StreamDecoder | None:
        """Turns drawn tokens into text; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        from lily.tokenizer import StreamDecoder

        return StreamDecoder(self._tokenizer)

    def close(self) -> None:
        """Free the model's memory and close its sessions. Calls after this raise ValueError."""
        self._store.close()
        for session in list(self._sessions):
            session.close()
        self._engine = None
        self._device = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._engine else ", closed"
        return (
            f"Model({self.info.source!r}, {self.info._size} parameters, {self.info.device}{state})"
        )

    def _repr_html_(self) -> str:
        return self.info._repr_html_()

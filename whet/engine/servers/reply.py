"""A reply that a server samples, in one attempt or in several: what was sampled of it, what of that was handed over, and what is left."""

from __future__ import annotations

from dataclasses import replace

from whet.engine.embedded.stops import Decode, completes
from whet.engine.servers.wire import SampledTokens, restarts
from whet.types import Chunk, Finish, Request
from whet.types.columns import Floats, Ints, Ragged
from whet.types.routes import Routes


class ServedReply:
    """A request's reply so far.

    Args:
        request: the request.
        decode: token ids to text, to find stop texts.
    """

    def __init__(self, request: Request, decode: Decode) -> None:
        self.request, self._decode = request, decode
        self.aborted = False
        """The caller asked for its end."""
        self.server_id = ""
        """Its id at the server, in the present attempt."""
        self.withheld = restarts(request.sampling)
        """Nothing is handed over before its end, for it cannot be continued: an attempt that is let go of is sampled again."""
        self._begun = list(request.tokens)[len(request.tokens) - request.num_begun :]
        self._given: list[int] = []
        self._waiting: list[SampledTokens] = []
        self.routed = request.sampling.routes
        """The experts of an attempt come with its end, and nothing of it is handed over before."""
        self.num_dropped = 0
        """Tokens after the end of a stop text, and of attempts that were sampled again."""

    @property
    def num_waiting(self) -> int:
        """Tokens that were not handed over yet."""
        return sum(len(part.tokens) for part in self._waiting)

    @property
    def rest(self) -> Request | None:
        """The request for what is left; None: nothing is."""
        sampling = self.request.sampling
        if sampling.max_tokens == len(self._given):
            return None
        return replace(
            self.request,
            tokens=Ints.join([self.request.tokens, Ints(self._given)]),
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(self._given)),
            num_begun=self.request.num_begun + len(self._given),
            routes_from=len(self.request.tokens) + len(self._given) if self._given else self.request.routes_from,
        )

    @property
    def lacks_routes(self) -> bool:
        """True if what waits to be handed over came without the experts that were asked for."""
        return self.routed and self.num_waiting > 0 and self._waiting[-1].routes is None

    def take(self, sampled: SampledTokens) -> bool:
        """Add an event's tokens. True: a stop text ends in them; they then end with it."""
        self._waiting.append(sampled)
        sampling = self.request.sampling
        if not sampling.stop:
            return False
        reply = self._begun + self._given + [token for part in self._waiting[:-1] for token in part.tokens]
        for place, token in enumerate(sampled.tokens):
            reply.append(token)
            if len(reply) >= sampling.min_tokens and completes(reply, sampling.stop, self._decode):
                self.num_dropped += len(sampled.tokens) - place - 1
                for column in (sampled.tokens, sampled.logprobs, sampled.top_logprobs, sampled.nuclei):
                    del column[place + 1 :]
                return True
        return False

    def let_go(self) -> None:
        """Forget what an attempt sampled that cannot be continued."""
        self.num_dropped += self.num_waiting
        self._waiting.clear()

    def chunk(self, version: int, finish: Finish | None) -> Chunk:
        """Hand over what was sampled."""
        parts = self._waiting
        tokens = Ints([token for part in parts for token in part.tokens])
        logprobs = Floats([each for part in parts for each in part.logprobs])
        self._given.extend(tokens)
        self._waiting = []
        return Chunk(
            tokens,
            logprobs,
            version,
            finish,
            logprobs if self.request.sampling.raw_logprobs else Floats(),
            tuple(top for part in parts for top in part.top_logprobs),
            Ragged(Ints(ids).tobytes() for part in parts for ids in part.nuclei),
            parts[-1].routes or Routes() if tokens else Routes(),
        )

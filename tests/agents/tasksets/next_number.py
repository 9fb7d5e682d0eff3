"""A taskset of verifiers: what comes after a number."""

import verifiers.v1 as vf


class Row(vf.TaskData):
    answer: str


class NextNumber(vf.Task[Row]):
    @vf.stop
    async def single(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class Settings(vf.TasksetConfig):
    n: int = 3


class Numbers(vf.Taskset[NextNumber, Settings]):
    def load(self) -> list[NextNumber]:
        rows = [Row(idx=i, prompt=f"What is {i}+1?", system_prompt="Be brief.", answer=str(i + 1)) for i in range(self.config.n)]
        return [NextNumber(row, self.config.task) for row in rows]


__all__ = ["Numbers"]

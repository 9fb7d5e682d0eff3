"""Instructions that a program can check: those of IFEval (arXiv 2311.07911) and of IFBench (arXiv 2507.02833)."""

from whet.reward.instructions.table import INSTRUCTIONS, Instruction, InstructionError, bind_instruction

__all__ = ["INSTRUCTIONS", "Instruction", "InstructionError", "bind_instruction"]

import random

import whet

sums = random.Random(0).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], 1100)
rows = [{"prompt": f"What is {a} + {b}? Answer with the number only.", "label": str(a + b)} for a, b in sums]
reward, rollout = {"name": "math", "options": {"extract": "last_number"}}, {"max_turn_tokens": 12}
run = whet.train("models/smollm2", rows[100:], reward, test=rows[:100], num_rollouts=20, rollout=rollout, train__optim__lr=1e-5)
run.show()

from problems import four_kinds_split

import whet

train, test = four_kinds_split()
reward, batch = {"name": "math", "options": {"extract": "last_number"}}, {"prompts_per_rollout": 8, "samples_per_prompt": 8}
settings = {"num_rollouts": 100, "rollout__max_turn_tokens": 12, "algo__clip_high": 0.28, "train__optim__lr": 1e-5}
run = whet.train("models/smollm2", train, reward, test=test, batch=batch, evaluate__interval=20, **settings)
run.show()

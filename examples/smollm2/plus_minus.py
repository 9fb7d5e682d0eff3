from problems import plus_minus, split

import whet

train, test = split(plus_minus(), seed=0)
reward, batch = {"name": "math", "options": {"extract": "last_number"}}, {"prompts_per_rollout": 8, "samples_per_prompt": 8}
settings = {"num_rollouts": 40, "rollout__max_turn_tokens": 12, "algo__clip_high": 0.28, "train__optim__lr": 1e-5}
run = whet.train("models/smollm2", train, reward, test=test, batch=batch, evaluate__interval=10, **settings)
run.show()

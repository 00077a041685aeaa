"""Reinforcement learning that is exactly on-policy: the trainer's log-probabilities are the sampler's, bit for bit.

rollouts     texts with their log-probabilities, by the engine; the seed of each is its own
advantages   what rewards say of each text next to others of its prompt
objectives   what is maximised: GRPO, RLOO, Dr. GRPO, REINFORCE
learner      gradients of leaves of texts, the comparison with what the sampler reported, the update
policy       both sides together, for a loop of one's own
config       a run for `detspec train`
"""

from detspec.rl.objectives import Objective, dr_grpo, grpo, reinforce, rloo
from detspec.rl.policy import Policy
from detspec.rl.rollouts import Rollout

__all__ = ["Objective", "Policy", "Rollout", "dr_grpo", "grpo", "reinforce", "rloo"]

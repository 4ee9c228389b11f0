"""The notary of the weights: after each sync, the tensors of every engine are compared with the trainer's.

from foreshock import notary

announced = notary.tensors_of(model.named_parameters(), dtype=torch.bfloat16)
client.log_weights(step, trainer=announced, engines={"0": notary.ask_vllm(llm)})
"""

from foreshock.notary.compare import Holding, Verdict, Wrong, judge
from foreshock.notary.digests import tensors_of
from foreshock.notary.engines import ask_sglang, ask_vllm, held_by, held_by_worker
from foreshock.notary.pieces import Piece, joined

__all__ = [
    "Holding",
    "Piece",
    "Verdict",
    "Wrong",
    "ask_sglang",
    "ask_vllm",
    "held_by",
    "held_by_worker",
    "joined",
    "judge",
    "tensors_of",
]

"""ZeRO through Accelerate and DeepSpeed: the only module that knows either."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import isfinite
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from rayrm.config.schema import RunConfig, TrainSection
from rayrm.data.packing import PackedBatch, pack_pairs
from rayrm.data.plan import Cutting
from rayrm.data.tokenize import TokenizedPair
from rayrm.errors import RayrmError
from rayrm.model.build import build_reward_model
from rayrm.model.reward import EncoderRewardModel, RewardModel, checkpoint_activations
from rayrm.training.schedule import build_schedule
from rayrm.training.state import TrainingState
from rayrm.training.zero import deepspeed_config

logger = logging.getLogger(__name__)


class Engine:
    """One worker's share of the model, its optimizer and its schedule."""

    def __init__(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, num_steps: int
    ) -> None:
        plugin = DeepSpeedPlugin(
            hf_ds_config=deepspeed_config(
                config.zero, dtype=config.model.dtype, max_grad_norm=config.train.max_grad_norm
            ),
            zero3_init_flag=config.zero.stage == 3,
        )
        if not torch.cuda.is_available():
            _leave_out_shared_memory_reduction()
        AcceleratorState._reset_state(reset_partial_state=True)  # a worker process may be reused
        # without its backend's name Accelerate takes a world of CPU workers for a single process
        backend = InitProcessGroupKwargs(backend=dist.get_backend())
        self._accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[backend])
        assert self._accelerator.distributed_type == DistributedType.DEEPSPEED
        assert self._accelerator.num_processes == dist.get_world_size()
        self._stage = config.zero.stage
        model = build_reward_model(
            config.model,
            tokenizer,
            seed=config.run.seed,
            shared_prompt=config.train.shared_prompt,
            gather=self._gather,
        )
        optimizer = _build_optimizer(model, config.train)
        self._engine: Any
        self._engine, _ = self._accelerator.prepare(model, optimizer)
        self._engine.train()  # transformers loads models for inference
        self._scheduler = build_schedule(
            self._engine.basic_optimizer, config.train, num_steps=num_steps
        )
        self._state = TrainingState(
            self._engine, self._scheduler, stage=self._stage, device=self.device
        )
        self.cutting = Cutting(model.layout, max_tokens=1)
        """How steps are cut into forwards; alike on all ranks."""
        self.grad_norm = 0.0
        """Global gradient norm of the last step, before clipping."""
        self.step_was_applied = True
        """Whether the last step changed the weights."""

    @property
    def device(self) -> torch.device:
        """Where batches have to be."""
        return self._accelerator.device

    @property
    def rank(self) -> int:
        """This worker's number in the world."""
        return self._accelerator.process_index

    @property
    def world_size(self) -> int:
        """Workers in the world."""
        return self._accelerator.num_processes

    @property
    def model(self) -> RewardModel | EncoderRewardModel:
        """The reward model under DeepSpeed; its parameters may be partitioned."""
        return self._engine.module

    @property
    def learning_rate(self) -> float:
        """The learning rate that the next step uses."""
        return float(self._scheduler.get_last_lr()[0])

    def pack(self, pairs: Sequence[TokenizedPair]) -> PackedBatch:
        """Return the tensors of one forward as this model takes them, on its device."""
        return pack_pairs(pairs, self.cutting.layout).to(self.device)

    def score(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the rewards of chosen and rejected, float32 ``[pairs]`` each."""
        chosen, rejected = self._engine(**batch.inputs).view(-1, 2).unbind(1)
        return chosen, rejected

    def measure_activations(self, batch: PackedBatch) -> int:
        """Return the bytes that a forward keeps for backward; changes nothing."""
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            chosen, rejected = self.score(batch)
        if self._stage == 3:  # counts on a backward after each forward
            self.backward((chosen.sum() + rejected.sum()) * 0, ends_step=False)
            self._engine.optimizer.zero_grad()  # where a reward is NaN, its gradient is not zero
        return sum(kept.values())

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in backward from here on."""
        checkpoint_activations(self.model.classifier)

    @property
    def bytes_to_come(self) -> int:
        """Bytes that optimizer states and gradients take on this device with the first step."""
        return self.state_bytes // (self.world_size if self._stage else 1)

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole training state on disk: weights and both moments in float32."""
        trained, _ = self.num_parameters()
        return 12 * trained

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to evaluation: no dropout, no gradients."""
        self._engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.train()

    def backward(self, loss: Tensor, *, ends_step: bool) -> None:
        """Add one micro-batch's gradient, and take the optimizer step with the last one.

        ``loss`` is this rank's part of a sum over the world: DeepSpeed's mean over ranks is undone.
        A step with a non-finite gradient norm is skipped on every rank, by DeepSpeed itself under
        ZeRO-3 and here otherwise.
        """
        self._engine.set_gradient_accumulation_boundary(is_boundary=ends_step)
        self._engine.backward(loss * self.world_size)
        if ends_step:
            self._take_step()

    def _take_step(self) -> None:
        if self._stage == 0:
            # gradients are whole and reduced here, and DeepSpeed does not look at them
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.grad_norm = float(nn.utils.get_total_norm(gradients))
            self.step_was_applied = isfinite(self.grad_norm)
            self._engine.step() if self.step_was_applied else self._engine.zero_grad()
        else:
            self._engine.step()
            self.grad_norm = float(self._engine.get_global_grad_norm())
            self.step_was_applied = self._engine.was_step_applied()
        if self.step_was_applied:
            self._scheduler.step()

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def reduce_max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over ranks."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        reduced = tensor.clone()
        dist.all_reduce(reduced, operation)
        return reduced

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def num_parameters(self) -> tuple[int, int]:
        """Return the numbers of trained and of all parameters."""
        counts = [
            (getattr(parameter, "ds_numel", parameter.numel()), parameter.requires_grad)
            for parameter in self.model.parameters()
        ]
        return sum(n for n, trained in counts if trained), sum(n for n, _ in counts)

    def trained_but_not_finite(self) -> list[str]:
        """Return the names of trained weights with a NaN or an infinity; collective."""
        bad: list[str] = []
        for name, parameter in self.model.classifier.named_parameters():
            if parameter.requires_grad:
                with self._gather([parameter]):
                    if not torch.isfinite(parameter).all():
                        bad.append(name)
        return bad

    def gather_state(self, *, trained_only: bool) -> dict[str, Tensor]:
        """Return whole weights by name on rank 0, and nothing on the others.

        One parameter at a time is whole, so that the peak is one copy of what is returned.
        """
        state: dict[str, Tensor] = {}
        for name, parameter in self.model.classifier.named_parameters():
            if trained_only and not parameter.requires_grad:
                continue
            with self._gather([parameter]):
                if self.rank == 0:
                    state[name] = parameter.detach().cpu().clone()
        return state

    def leave_zero(self) -> None:
        """Let models that are loaded from here on be whole; this engine's stays partitioned."""
        unset_hf_deepspeed_config()

    def save(self, folder: str) -> None:
        """Write this rank's share of the training state; every rank must call this."""
        self._state.save(folder)

    def load(self, folder: str, *, world_size: int) -> None:
        """Read what ``world_size`` ranks saved, be they more or fewer than there are now.

        Raises:
            CheckpointError: it is incomplete, or of another model.
        """
        self._state.load(folder, world_size=world_size)

    def _gather(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        return deepspeed.zero.GatheredParameters(
            parameters, modifier_rank=0, enabled=self._stage == 3
        )


def _leave_out_shared_memory_reduction() -> None:
    """Keep DeepSpeed from compiling its all-reduce for CPUs, a minute on every new machine.

    ZeRO-3 scatters and gathers, and reduces no more than norms and metrics.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _build_optimizer(model: nn.Module, train: TrainSection) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise RayrmError("model: no weight is trained; check model.lora, peft and adapter_path")
    matrices = [parameter for parameter in trained if _num_dimensions(parameter) >= 2]
    vectors = [parameter for parameter in trained if _num_dimensions(parameter) < 2]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # fused updates a whole group in one pass over memory, on CPU too
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=train.learning_rate, fused=True
    )


def _num_dimensions(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))

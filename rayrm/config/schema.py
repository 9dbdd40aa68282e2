"""The configuration: one frozen section per concern, a sentence under every field.

Names are those of transformers, TRL and peft wherever they have one. A default stands at its field
and nowhere else; a section that is null is a feature that is off.
"""

from typing import Annotated, Any, Generic, Literal, Self, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rayrm.config.fields import (
    Argument,
    Arguments,
    Name,
    NoBool,
    NonNegativeFloat,
    Number,
    PositiveFloat,
    PositiveInt,
    Share,
    Text,
    WholeAsText,
    WholeNumber,
)


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, field docstrings become descriptions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    def differs_from_default(self, field: str) -> bool:
        """Whether the field holds something else than its default."""
        return getattr(self, field) != type(self).model_fields[field].default


class RunSection(Section):
    """Where the run lives and how it starts."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"), WholeAsText] = (
        "reward-model"
    )
    """Name of the run and of its folder under output_dir (letters, digits, '.', '_' and '-')."""
    output_dir: Name = "outputs"
    """Folder that holds runs: a local path, or a URL that pyarrow opens (s3://, gs://)."""
    seed: Annotated[int, Field(ge=0, lt=2**31), NoBool] = 42
    """Seed of the new head, the adapters and the order of the rows."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto goes on with an unfinished run of this name and equal config; never refuses to; must
    refuses to start anew."""


class LoraSection(Section):
    """Low-rank adapters, as peft.LoraConfig names them; the head is always trained and saved."""

    r: PositiveInt = 16
    """Rank of the adapters."""
    lora_alpha: PositiveFloat = 32
    """Scale of the adapters: they are multiplied by lora_alpha / r."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1), NoBool] = 0.0
    """Dropout before each adapter; kept also when model.disable_dropout is true."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names (or a regular expression) of the layers that get an adapter; all-linear spares the
    head."""
    modules_to_save: tuple[str, ...] = ()
    """Further modules trained in full and saved with the adapter; the head is always among them."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead (rank-stabilised LoRA)."""
    use_dora: bool = False
    """Train magnitude and direction apart (DoRA)."""


class ModelSection(Section):
    """The backbone, its tokenizer and what is trained of it."""

    name_or_path: Name = "quickstart"
    """A folder or hub name of a model, or 'quickstart': a tiny decoder made from scratch."""
    revision: Text = "main"
    """Branch, tag or commit of a hub model."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in forward and backward; master weights, head and loss are float32."""
    attn_implementation: str | None = None
    """Attention of transformers (sdpa, eager, flash_attention_2); null lets transformers choose."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model."""
    chat_template_path: str | None = None
    """A Jinja file, or a tokenizer folder, whose chat template is used and saved; with a tokenizer
    come the special tokens that its template writes."""
    eos_token: str | None = None
    """Token that ends plain text; null takes the tokenizer's."""
    pad_token: str | None = None
    """Padding token of the saved model; null takes the tokenizer's, or another that never ends a
    text where that is also the EOS token."""
    disable_dropout: bool = True
    """Switch the backbone's dropout off, so that both sides of a pair see one model."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in backward: less memory, about a third more time; auto does where
    memory is short."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Hold the frozen base of an adapter in 4 bits (NF4) or in 8, by bitsandbytes; null does
    not."""
    model_init_kwargs: Arguments = {}
    """Further keyword arguments of from_pretrained."""
    lora: LoraSection | None = None
    """Adapters to train instead of all weights; null trains every weight."""
    peft: Arguments = {}
    """Any other peft configuration that wraps layers, with its peft_type: {peft_type: LOHA, r: 8},
    or LoRA with fields that model.lora lacks."""
    adapter_path: str | None = None
    """Folder of an adapter to go on training; beside lora or peft it is merged into the weights,
    and a new adapter is trained on top."""

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter is trained and saved, not all weights."""
        return self.has_new_adapter or self.adapter_path is not None

    @property
    def stacks_adapter(self) -> bool:
        """Whether a saved adapter is merged into the weights below a new one."""
        return self.has_new_adapter and self.adapter_path is not None

    @property
    def has_new_adapter(self) -> bool:
        """Whether an adapter is made anew."""
        return self.lora is not None or bool(self.peft)

    @model_validator(mode="after")
    def _one_new_adapter(self) -> "ModelSection":
        if self.lora is not None and self.peft:
            raise ValueError("lora and peft are both set: each makes a new adapter; remove one")
        if self.peft and "peft_type" not in self.peft:
            raise ValueError("peft needs peft_type, such as LORA, LOHA or IA3")
        return self

    @model_validator(mode="after")
    def _quantized_weights_stay(self) -> "ModelSection":
        if self.quantization is not None and not self.trains_adapter:
            raise ValueError(
                "quantization: weights of few bits cannot be trained themselves; set lora, peft or "
                "adapter_path, too"
            )
        if self.quantization is not None and self.stacks_adapter:
            raise ValueError(
                "quantization: adapter_path cannot be merged into weights of few bits; merge it "
                "first (python -m rayrm.export ADAPTER OUT --merge) and give OUT as name_or_path"
            )
        # DeepSpeed loses track of the weights that DoRA reads, and CPUs pack them out of its sight
        if self.quantization is not None and self._uses_dora:
            raise ValueError("quantization: does not go with use_dora; leave one out")
        return self

    @property
    def _uses_dora(self) -> bool:
        return bool(self.peft.get("use_dora")) or (self.lora is not None and self.lora.use_dora)


class Source(Section):
    """One place that rows come from."""

    path: Name
    """A file, folder, glob or URL of jsonl, json or parquet (also .gz), 'hub:NAME', or
    'quickstart:train' and 'quickstart:eval' (generated pairs)."""
    split: Text | None = None
    """Split of a hub data set (default: train)."""
    name: Text | None = None
    """Configuration of a hub data set."""
    limit: PositiveInt | None = None
    """Use at most this many rows, from the start."""

    @model_validator(mode="after")
    def _hub_only_fields(self) -> "Source":
        for field in ("split", "name"):
            if getattr(self, field) is not None and not self.path.startswith("hub:"):
                raise ValueError(f"{field} applies to 'hub:NAME' sources only; remove it")
        return self


def _is_source(value: Any) -> bool:
    return isinstance(value, str | Source) or (isinstance(value, dict) and "path" in value)


def _as_source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _as_sources(value: Any) -> Any:
    return cast(Any, value) if isinstance(value, list | tuple) else (value,)


def _as_named_sources(value: Any) -> Any:
    if value is None:
        return {}
    return {"": value} if _is_source(value) else value


AnySource = Annotated[Source, BeforeValidator(_as_source, json_schema_input_type=str | Source)]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]*$")]


class DataSection(Section):
    """Preference pairs for training and evaluation, and what makes a row fit."""

    train: Annotated[
        tuple[AnySource, ...],
        BeforeValidator(_as_sources, json_schema_input_type=AnySource | tuple[AnySource, ...]),
    ] = (Source(path="quickstart:train"),)
    """A source or a list of sources; [] when fit() is handed the data set."""
    eval: Annotated[
        dict[SetName, AnySource],
        BeforeValidator(
            _as_named_sources, json_schema_input_type=AnySource | dict[SetName, AnySource] | None
        ),
    ] = {}
    """A source, or a mapping from set names to sources (metrics are then eval_<set>_accuracy)."""
    max_length: Annotated[int, Field(ge=2), NoBool] = 1024
    """Most tokens of prompt and reply together; a longer pair is dropped and counted, never cut."""
    columns: dict[str, str] = {}
    """Standard column name (prompt, chosen, rejected, margin, tools ...) to the name in your
    data."""
    on_bad_row: Literal["drop", "stop"] = "drop"
    """drop counts and keeps aside rows that cannot be used; stop ends the run at the first."""
    num_blocks: PositiveInt | None = None
    """Cut the rows into this many blocks before tokenizing; null streams blocks of fixed size."""
    shuffle: bool = True
    """Draw a new order each epoch from seed and epoch; false keeps the order of the files."""
    shuffle_buffer_size: PositiveInt = 65_536
    """Source rows that are shuffled among each other; a larger file is shuffled in such windows."""

    @model_validator(mode="after")
    def _buffer_needs_shuffle(self) -> "DataSection":
        if not self.shuffle and self.differs_from_default("shuffle_buffer_size"):
            raise ValueError("shuffle_buffer_size has no effect with shuffle: false; remove one")
        return self


class LossSection(Section):
    """What is minimised."""

    objective: Literal["bradley_terry"] = "bradley_terry"
    """Negative log-likelihood that chosen wins: -log sigmoid(chosen - rejected - margin)."""
    center_rewards_coefficient: NonNegativeFloat | None = None
    """Weight of (chosen + rejected)^2, which keeps rewards near zero; null leaves it out."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), NoBool] = 0.0
    """Probability that a label is taken to be the wrong way round."""


def _switch_as_text(value: Any) -> Any:
    """Return the word that was written where YAML reads on and off as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


SharedPrompt = Literal["auto", "on", "off"]


class TrainSection(Section):
    """The optimizer and the rhythm of the run."""

    batch_size: PositiveInt = 32
    """Pairs an optimizer step, over all workers; it does not change with their number."""
    max_tokens_per_micro_batch: PositiveInt | Literal["auto"] = "auto"
    """Most tokens that one forward computes on one worker; a single pair may exceed it; auto takes
    what fits into memory."""
    shared_prompt: Annotated[SharedPrompt, BeforeValidator(_switch_as_text)] = "auto"
    """Compute a prompt once for both replies, and no padding: auto where that is exact; on refuses
    other models; off pads."""
    num_train_epochs: PositiveFloat = 1.0
    """Passes over the training pairs, when max_steps is -1."""
    max_steps: Annotated[int, Field(ge=-1), NoBool] = -1
    """Optimizer steps to run; -1 means by epochs."""
    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate of AdamW: about 1e-4 for adapters and small models, 1e-5 or less for every
    weight of a large one."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr"
    ] = "linear"
    """Shape of the learning rate after warm-up, as transformers names it."""
    lr_scheduler_kwargs: Arguments = {}
    """Further arguments of that schedule, such as min_lr_rate."""
    warmup_ratio: Share = 0.0
    """Share of all steps in which the learning rate rises from zero."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices; biases and norms are spared."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the global gradient norm to this; 0 does not clip."""
    logging_steps: PositiveInt = 10
    """Write a metrics line every so many steps."""
    eval_steps: PositiveInt | None = None
    """Evaluate every so many steps; null evaluates once, at the end."""
    save_steps: PositiveInt | None = 500
    """Write a checkpoint every so many steps; null writes none but those of the best model."""
    save_minutes: PositiveFloat | None = None
    """Write a checkpoint also after so many minutes without one."""
    save_total_limit: PositiveInt = 2
    """Checkpoints to keep; the best one is among them when there is a metric_for_best_model."""
    metric_for_best_model: str | None = None
    """Evaluation metric (eval_loss, eval_accuracy, eval_<set>_accuracy ...) whose best checkpoint
    is exported; null exports the last."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after this many evaluations without a better metric_for_best_model."""

    @model_validator(mode="after")
    def _settings_have_effect(self) -> "TrainSection":
        if self.max_steps == 0:
            raise ValueError("max_steps is 0: give a number of steps, or -1 for whole epochs")
        if self.max_steps > 0 and self.differs_from_default("num_train_epochs"):
            raise ValueError("num_train_epochs has no effect with max_steps set; remove one")
        if self.early_stopping_patience is not None and self.metric_for_best_model is None:
            raise ValueError("early_stopping_patience needs metric_for_best_model")
        if self.lr_scheduler_type == "constant" and self.warmup_ratio > 0:
            raise ValueError(
                "warmup_ratio has no effect with lr_scheduler_type: constant; "
                "use constant_with_warmup"
            )
        return self


_FIELDS_OF_DEEPSPEED = {
    "train_batch_size": "train.batch_size",
    "train_micro_batch_size_per_gpu": "train.max_tokens_per_micro_batch",
    "gradient_accumulation_steps": "train.max_tokens_per_micro_batch",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "the fields of train",
    "scheduler": "train.lr_scheduler_type",
    "fp16": "model.dtype",
    "bf16": "model.dtype",
}


class ZeroSection(Section):
    """How DeepSpeed partitions the training state over the workers."""

    stage: Annotated[Literal[0, 1, 2, 3], NoBool] = 3
    """0 none, 1 optimizer states, 2 and gradients, 3 and parameters."""
    offload_optimizer: Literal["cpu"] | None = None
    """Keep optimizer states in host memory."""
    offload_param: Literal["cpu"] | None = None
    """Keep parameters in host memory (stage 3)."""
    extra: Arguments = {}
    """A DeepSpeed dict laid over the built one, key by key."""

    @model_validator(mode="after")
    def _extra_leaves_what_other_fields_say(self) -> "ZeroSection":
        for name in self.extra:
            if name in _FIELDS_OF_DEEPSPEED:
                raise ValueError(f"extra: {name} is set by {_FIELDS_OF_DEEPSPEED[name]}")
        optimization = self.extra.get("zero_optimization")
        if isinstance(optimization, dict) and "stage" in optimization:
            raise ValueError("extra: zero_optimization.stage is set by zero.stage")
        return self

    @model_validator(mode="after")
    def _offload_needs_stage(self) -> "ZeroSection":
        if self.offload_param and self.stage != 3:
            raise ValueError("offload_param needs stage: 3")
        if self.offload_optimizer and self.stage == 0:
            raise ValueError("offload_optimizer needs stage: 1, 2 or 3")
        return self


class WorkerRange(Section):
    """How many training workers there may be; Ray Train takes as many as it can place."""

    min: PositiveInt
    """Training goes on with so many."""
    max: PositiveInt
    """It never takes more."""
    resize_monitor_interval_s: NonNegativeFloat = 60.0
    """Look every so many seconds for room for more; to take it costs a restart."""

    @model_validator(mode="after")
    def _is_a_range(self) -> "WorkerRange":
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, which is more than max, {self.max}")
        return self


class ScalingSection(Section):
    """Workers and what each may use."""

    num_workers: PositiveInt | WorkerRange = 1
    """Training workers, one GPU each where GPUs are used; {min, max} for a cluster that grows and
    shrinks, where the run goes on from its last checkpoint with as many as there are."""
    use_gpu: Literal["auto"] | bool = "auto"
    """auto takes GPUs if the cluster has enough of them."""
    resources_per_worker: dict[str, NonNegativeFloat] | None = None
    """Ray resources of one worker, such as {CPU: 4, GPU: 1}; null asks for what fits."""
    max_failures: Annotated[int, Field(ge=0), NoBool] = 3
    """Restarts from the last checkpoint after a lost worker before the run fails."""
    timeout_minutes: PositiveFloat = 30.0
    """Longest wait for free resources, for rows, or for another worker before that is an error."""

    @model_validator(mode="after")
    def _resources_are_spelled_as_ray_does(self) -> "ScalingSection":
        for name in self.resources_per_worker or {}:
            if name.upper() in ("CPU", "GPU") and not name.isupper():
                raise ValueError(f"resources_per_worker: {name}: did you mean {name.upper()}?")
        if self.resources_per_worker is not None and not any(self.resources_per_worker.values()):
            raise ValueError("resources_per_worker: a worker needs something, such as {CPU: 1}")
        return self

    @model_validator(mode="after")
    def _gpus_are_used(self) -> "ScalingSection":
        if self.use_gpu is False and (self.resources_per_worker or {}).get("GPU", 0) > 0:
            raise ValueError("resources_per_worker asks for a GPU, but use_gpu is false")
        return self


class WandbSection(Section):
    """One Weights & Biases run, written by the first worker."""

    project: Name = "rayrm"
    """Project of the run."""
    entity: Text | None = None
    """User or team; null takes the account's default."""
    group: Text | None = None
    """Group of the run."""
    tags: tuple[Text, ...] = ()
    """Tags of the run."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """auto is online where WANDB_API_KEY or a login is present, else offline."""


class TrackingSection(Section):
    """Where metrics go; metrics.jsonl is always written."""

    wandb: WandbSection | None = WandbSection()
    """Weights & Biases, or null."""
    log_rows: bool = False
    """Also write rows/, where each worker notes the rows of its every step."""


class RunConfig(Section):
    """Everything a run needs to know."""

    run: RunSection = RunSection()
    """Where the run lives and how it starts."""
    model: ModelSection = ModelSection()
    """The backbone, its tokenizer and what is trained of it."""
    data: DataSection = DataSection()
    """Preference pairs for training and evaluation."""
    loss: LossSection = LossSection()
    """What is minimised."""
    train: TrainSection = TrainSection()
    """The optimizer and the rhythm of the run."""
    zero: ZeroSection = ZeroSection()
    """How DeepSpeed partitions the training state."""
    scaling: ScalingSection = ScalingSection()
    """Workers and what each may use."""
    tracking: TrackingSection = TrackingSection()
    """Where metrics go."""

    @model_validator(mode="after")
    def _master_weights_need_zero(self) -> "RunConfig":
        if self.zero.stage == 0 and self.model.dtype == "bfloat16":
            raise ValueError(
                "zero.stage: DeepSpeed keeps no float32 master weights at stage 0; use stage: 1 to "
                "3, or model.dtype: float32"
            )
        return self


Bound = TypeVar("Bound", int, float)


class Range(Section, Generic[Bound]):
    """Numbers between two."""

    low: Bound
    """The least value."""
    high: Bound
    """The greatest value; of whole numbers the first that is too high."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g}, not below high, {self.high:g}")
        return self


class Uniform(Range[Number]):
    """Any number between two, each as likely."""

    type: Literal["uniform"]
    """uniform"""


class LogUniform(Range[PositiveFloat]):
    """A number between two, its logarithm each as likely."""

    type: Literal["log_uniform"]
    """log_uniform"""


class RandInt(Range[WholeNumber]):
    """A whole number, each as likely."""

    type: Literal["randint"]
    """randint"""


AnyValues = Annotated[tuple[Argument, ...], Field(min_length=1)]


class Choice(Section):
    """One of several values, each as likely."""

    type: Literal["choice"]
    """choice"""
    values: AnyValues
    """What to choose from."""


class Grid(Section):
    """Every one of several values, with every one of the other grids."""

    type: Literal["grid"]
    """grid"""
    values: AnyValues
    """What to go through."""


Distribution = Annotated[
    Uniform | LogUniform | RandInt | Choice | Grid, Field(discriminator="type")
]


class SearchSection(Section):
    """What a sweep tries, and how it judges."""

    space: Annotated[dict[str, Distribution], Field(min_length=1)] = {
        "train.learning_rate": LogUniform(type="log_uniform", low=1e-6, high=1e-3),
        "loss.center_rewards_coefficient": Choice(type="choice", values=(0.0, 1e-3, 1e-2, 1e-1)),
        "model.lora.r": Choice(type="choice", values=(4, 8, 16, 32, 64)),
    }
    """Dotted field to distribution: {type: uniform, log_uniform or randint, low, high}, or {type:
    choice or grid, values}."""
    num_samples: PositiveInt = 8
    """Configurations to try; those of grids are among them."""
    metric: Name = "eval_accuracy"
    """Evaluation metric that decides."""
    mode: Literal["max", "min"] = "max"
    """Whether more of the metric is better, or less."""
    scheduler: Literal["none", "asha", "hyperband", "pbt"] = "asha"
    """asha stops the worse trials on their way (three of four at each rung); hyperband does, with
    first rungs of three heights; pbt has the worst quarter go on from the best quarter's weights
    with changed values, all at a time; none trains all."""
    searcher: Literal["random", "optuna"] = "random"
    """random draws every configuration beforehand; optuna (`pip install 'rayrm[tune]'`) draws where
    those that ended promise most."""
    repeats: PositiveInt = 1
    """Train each configuration with so many seeds, and judge it by their mean."""
    max_concurrent: PositiveInt | None = None
    """Trials at a time; null takes as many as the cluster has room for."""
    time_budget: PositiveFloat | None = None
    """Minutes after which no more is trained; null trains all."""


class SweepConfig(RunConfig):
    """A run, and what of it is searched."""

    search: SearchSection
    """What a sweep tries, and how it judges."""

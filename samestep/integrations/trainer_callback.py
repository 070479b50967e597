"""A callback of the Hugging Face Trainer, called on every rank before rank 0 alone saves."""

from typing import Any

from transformers import TrainerCallback, TrainingArguments

from samestep.integrations.hf import unwrapped


class SaveWhole(TrainerCallback):
    """Gathers state that ranks share on rank 0, right before the Trainer saves it there.

        Trainer(..., optimizer_cls_and_kwargs=samestep.hf.factory(lr=3e-4, sharding="zero2"),
                callbacks=[samestep.hf.SaveWhole()])

    Where there is nothing to gather it does nothing. Callbacks that decide to save come before it.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._gather(args, control.should_save, known["optimizer"])

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        # With save_strategy="best" it is decided afterwards.
        self._gather(args, args.save_strategy == "best", known.get("optimizer"))

    def _gather(self, args: TrainingArguments, is_due: bool, optimizer: Any) -> None:
        if is_due and not args.save_only_model and optimizer is not None:
            unwrapped(optimizer).consolidate_state_dict()

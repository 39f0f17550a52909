"""FaultBanning: how long workers are left alone after a fault."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_swarm.callbacks._strategy import require_swarm
from lightning_swarm.policies.banning import DEFAULT_RULES, BanList, BanRule, Cause

_NO_FAULTS = (Cause.BUSY, Cause.CALLER)
_REFUTABLE = ("refused", "reset")


class FaultBanning(pl.Callback):
    """Chooses how long a worker is left alone after a fault, and logs every ban.

    Without this callback workers are banned, too, by the rules that are its defaults. A ban's cause decides its length:
    ``"refused"`` (no connection, 5 s), ``"reset"`` (the connection broke, 2 s), ``"link"`` (two workers cannot reach
    each other: their link, 10 s), ``"timeout"`` (15 s), ``"protocol"`` (wrong shapes, what cannot be read, 60 s),
    ``"wrong_result"`` (NaN where others have none, 300 s) and ``"failed"`` (10 s). It grows with every repetition. A
    worker that is busy, and one that was asked for something wrong, are never banned.

    Bans are logged at level WARNING, and to the trainer's loggers: ``swarm/bans/{cause}``, how many there have been,
    and ``swarm/ban_s/{cause}``, the length of the latest one in seconds.

    Args:
        first_s: The length of a first ban by cause, in seconds; those of other causes stay. 0: it bans nobody.
            Raise ``"timeout"`` when workers hang for minutes, lower it when they are slow now and then.
        growth: By what a ban is longer than the one before; by default 2, and 4 for ``"protocol"`` and
            ``"wrong_result"``. 1: all are alike.
        longest_s: No ban is longer, in seconds; by default 10 minutes, more for the causes that are no accident.
        forget_after_s: A worker that was not banned for so many seconds starts again at the first length.
        lifted_by_announcement: The causes whose first ban ends when the worker joins again, which refutes that it
            cannot be reached; of ``"refused"`` and ``"reset"``, and by default both.
        when_all_banned: What happens at a stage whose workers are all banned: ``"ignore"`` their bans, since a
            doubtful worker is better than none, or ``"wait"`` until the first is free again.

    Raises:
        MisconfigurationException: For values that make no sense, or when the trainer's strategy is no
            ``SwarmStrategy``.

    Example:
        >>> from lightning_swarm.callbacks import FaultBanning
        >>> banning = FaultBanning(first_s={"timeout": 60}, growth=3)
    """

    def __init__(
        self,
        first_s: Mapping[str, float] | None = None,
        growth: float | None = None,
        longest_s: float | None = None,
        forget_after_s: float = 900.0,
        lifted_by_announcement: Collection[str] = _REFUTABLE,
        when_all_banned: Literal["ignore", "wait"] = "ignore",
    ) -> None:
        first_s = dict(first_s or {})
        causes = [cause.value for cause in Cause if cause not in _NO_FAULTS]
        for cause, seconds in first_s.items():
            if cause not in causes:
                raise MisconfigurationException(
                    f"FaultBanning(first_s={{{cause!r}: ...}}) is no cause of bans; there are: {', '.join(causes)}."
                )
            _check(f"first_s={{{cause!r}: {seconds!r}}}", seconds, 0, "a number of seconds, at least 0")
        _check(f"growth={growth!r}", growth, 1, "a factor of at least 1")
        _check(f"forget_after_s={forget_after_s!r}", forget_after_s, 0, "a number of seconds, at least 0")
        longest_first_s = max(first_s.values(), default=0)
        bound = f"at least the longest first ban, {longest_first_s:g} s"
        _check(f"longest_s={longest_s!r}", longest_s, longest_first_s, bound)
        if isinstance(lifted_by_announcement, str) or not set(lifted_by_announcement) <= set(_REFUTABLE):
            raise MisconfigurationException(
                f"FaultBanning(lifted_by_announcement={lifted_by_announcement!r}) must be of {list(_REFUTABLE)}: that "
                "a worker joins again says nothing against the other causes."
            )
        if when_all_banned not in ("ignore", "wait"):
            raise MisconfigurationException(
                f"FaultBanning(when_all_banned={when_all_banned!r}) must be 'ignore' or 'wait'."
            )
        self._rules: dict[Cause, BanRule] = {}
        for cause in (Cause(name) for name in causes):
            default = DEFAULT_RULES[cause]
            self._rules[cause] = replace(
                default,
                first_s=float(first_s.get(cause.value, default.first_s)),
                growth=default.growth if growth is None else float(growth),
                longest_s=max(default.longest_s, longest_first_s) if longest_s is None else float(longest_s),
                lifted_by_announcement=cause.value in lifted_by_announcement,
            )
        self._forget_after_s = float(forget_after_s)
        self._when_all_banned = when_all_banned
        self._logged = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        require_swarm(trainer, "FaultBanning", "banning")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._logged = 0
        bans = BanList(self._rules, forget_after_s=self._forget_after_s, when_all_banned=self._when_all_banned)
        trainer.strategy.banning(bans)  # type: ignore[attr-defined]

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        bans = trainer.strategy.bans()  # type: ignore[attr-defined]
        if len(bans) == self._logged:
            return
        new, self._logged = bans[self._logged :], len(bans)
        metrics: dict[str, float] = {f"swarm/ban_s/{ban['cause']}": ban["seconds"] for ban in new}
        metrics.update({f"swarm/bans/{cause}": count for cause, count in Counter(b["cause"] for b in bans).items()})
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


def _check(argument: str, value: float | None, least: float, meaning: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
        raise MisconfigurationException(f"FaultBanning({argument}) must be {meaning}.")

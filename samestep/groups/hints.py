"""Suggests what an unknown keyword probably means.

A near match of letters alone misleads: "norm_lr" is closer to "norm_factor" than to the learning
rate of norms. By letters only typos are told, and the rest word by
word: what is asked for (a rate, a decay) of which parameters, or a word of other libraries.
"""

import difflib
import re
from collections.abc import Collection, Mapping

# How people call the parameters of a role, and what they ask for of them.
ROLE_WORDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("matrix", "matrices", "muon", "hidden", "body", "weight", "weights"), "matrix"
    ),
    **dict.fromkeys(
        ("embed", "embeds", "embedding", "embeddings", "emb", "wte", "wpe", "token", "tokens"),
        "embedding",
    ),
    **dict.fromkeys(("head", "unembed", "unembedding", "output", "classifier"), "unembedding"),
    **dict.fromkeys(
        ("scalar", "scalars", "norm", "norms", "layernorm", "bias", "biases", "vector", "vectors"),
        "scalar",
    ),
}
QUANTITIES: tuple[tuple[str, str, str], ...] = (
    ("lr", "lr", r"(lrs?|learning_rates?)"),
    ("decay", "weight_decay", r"(weight_decays?|wd|decays?)"),
)
RULE_WORDS = {"muon", "adam", "adamw"}
NAMES = {"lr": "learning rate", "decay": "weight decay"}
# A word of other libraries, or of papers, and the keyword that it asks for.
WORDS: Mapping[str, str] = {
    "clip": "max_grad_norm",
    "clipping": "max_grad_norm",
    "clipnorm": "max_grad_norm",
    "zero": "sharding",
    "zero1": "sharding",
    "zero2": "sharding",
    "shard": "sharding",
    "bf16": "master_weights",
    "fp16": "master_weights",
    "fp32": "master_weights",
    "8bit": "state_dtypes",
    "mesh": "process_group",
    "newton": "ns_steps",
    "pg": "process_group",
    "muon_beta": "momentum",
    "momentum_dtype": "state_dtypes",
    "beta": "betas",
    "overlap": "overlap_grad_reduce",
    "no_weight_decay": "no_decay",
}
TYPO = 0.85  # how alike letters have to be


def hint(name: str, known: Collection[str]) -> str:
    """Advice to append to an error about an unknown keyword; "" if there is none."""
    if WORDS.get(name) in known:
        return f"; did you mean {WORDS[name]!r}?"
    typo = difflib.get_close_matches(name, known, n=1, cutoff=TYPO)
    if not typo and (told := _of_some_parameters(name, known)):
        return told
    if name.endswith("_params"):
        return '; parameters come as groups [{"params": [...], "rule": "muon"}, ...]'
    meant = typo or _of_others(name, known) or _same_words(name, known)
    return f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""


def _of_some_parameters(name: str, known: Collection[str]) -> str:
    """Return advice on setting a rate or decay for some parameters, as for head_lr."""
    for short, key, pattern in QUANTITIES:
        of = re.fullmatch(rf"(?P<before>\w+?)_{pattern}|{pattern}_(?P<after>\w+)", name)
        whose = of and (of["before"] or of["after"])
        if not whose or whose == "no":
            continue
        roles = {ROLE_WORDS[word]: None for word in whose.split("_") if word in ROLE_WORDS}
        if len(roles) == 1 and (role := f"{next(iter(roles))}_{short}") in known:
            return f"; did you mean {role!r}?"
        if {*whose.split("_")} <= RULE_WORDS:
            return f"; did you mean {key!r}?"
        by_name = (
            f', or overrides={{"*{whose}*": {{"{key}": ...}}}}' if "overrides" in known else ""
        )
        return (
            f"; a {NAMES[short]} of some parameters alone is {key!r} in a parameter group of their "
            f"own{by_name}"
        )
    return ""


def _of_others(name: str, known: Collection[str]) -> list[str]:
    words = name.split("_")
    fitting = [WORDS[word] for word in words if word in WORDS]
    return [meant for meant in fitting if meant in known][:1]


def _same_words(name: str, known: Collection[str]) -> list[str]:
    """Keywords that have all words of the name, or all of whose words the name has."""
    words = set(name.split("_"))
    wider = [key for key in known if words <= set(key.split("_"))]
    narrower = [key for key in known if set(key.split("_")) <= words and len(key) > 2]
    found = wider or sorted(narrower, key=len)[-1:]
    return sorted(found) if len(found) <= 3 else []

"""Write a GGUF model as a Hugging Face folder, which loads in a second or two where unpacking takes half a minute.

    python scripts/unpack_model.py model.gguf folder/

The folder holds dense float32 weights (as transformers unpacks them), the tokenizer and its chat template, and serves
wherever a model is named. It knows nothing of memories.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from masw_lightning.adapter.backbone import Backbone, load_backbone, load_tokenizer
from masw_lightning.errors import UserError


def unpack(gguf: Path, folder: Path) -> None:
    """Read ``gguf`` and write ``folder``.

    Raises:
        UserError: no such file, or nothing can be written there.
    """
    model, tokenizer = load_backbone(Backbone(str(gguf))), load_tokenizer(str(gguf))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise UserError(f"cannot write the model to {folder}: {error.strerror}; choose another folder.") from error


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0, or 1 with one sentence on stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("gguf", type=Path, help="the .gguf file")
    parser.add_argument("folder", type=Path, help="where to write the model")
    chosen = parser.parse_args(arguments)
    try:
        unpack(chosen.gguf, chosen.folder)
    except UserError as error:
        print(f"unpack_model: {error}", file=sys.stderr)
        return 1
    print(f"{chosen.folder}: {sum(f.stat().st_size for f in chosen.folder.iterdir()) // 1_000_000} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

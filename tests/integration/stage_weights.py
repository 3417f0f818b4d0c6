"""Entries that the fork server runs for tests: there torch and deepspeed are imported already."""

from multiprocessing.connection import Connection


def fp32_weights(connection: Connection) -> None:
    """Receives the path of a checkpoint folder, sends {name: float32 array} of the whole model, from DeepSpeed's own files."""
    import logging
    from pathlib import Path

    import torch
    from deepspeed.utils.logging import logger

    logger.setLevel(logging.ERROR)
    folder = Path(connection.recv())
    model_file = folder / "mp_rank_00_model_states.pt"
    if model_file.exists():  # stages 0 to 2 hold the model whole; in float32 it is the master copy
        state = torch.load(model_file, weights_only=True)["module"]
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        state = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
    connection.send({name: tensor.detach().float().numpy() for name, tensor in state.items()})

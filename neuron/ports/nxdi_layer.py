"""NxdiLayer: a decoder layer on neuronx-distributed-inference behind the target protocol.

Such a layer takes a boolean mask [B,1,S,S]. B batch, S tokens of this pass, P tokens of the past, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minimax_tools.errors import TargetError
from neuron.ports.nxdi_conversion import Conversion
from neuron.ports.nxdi_layout import NxdiLayout
from neuron.ports.nxdi_sites import find_sites

# Variable that tells NxD to compute on the CPU.
CPU_MODE_VARIABLE = "NXD_CPU_MODE"


class NxdiLayer(nn.Module):
    """A decoder layer on NxDI behind the target protocol.

    Args:
        layer: The port's layer.
        conversion: The way its weights are made.
        layout: The layout of this rank's weights.
        neuron_config: NxDI's config of the device: the layer reads its stage there.
        is_cpu_mode: Whether NxD was set to compute on the CPU.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        conversion: Conversion,
        layout: NxdiLayout,
        neuron_config: Any,
        is_cpu_mode: bool,
    ) -> None:
        super().__init__()
        self.layer = layer
        self._conversion = conversion
        self._neuron_config = neuron_config
        self._is_cpu_mode = is_cpu_mode
        self.sites = find_sites(self, layout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """Run the layer on [B,S,H], mask [B,P+S] of 0/1 and positions [B,S]; return its output [B,S,H] first.

        Raises:
            TargetError: NxD was set to compute on another device than that of the states.
        """
        self._refuse_other_device(hidden_states.device)
        num_tokens = hidden_states.shape[1]
        causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=attention_mask.device).tril()
        is_real = attention_mask.bool()[:, None, None, :]
        active_mask = causal & is_real[..., -num_tokens:]
        self._neuron_config.is_prefill_stage = past_key_value is None
        keywords: dict[str, Any] = {"attention_mask": active_mask}
        if past_key_value is not None:
            # NxDI has two masks: one for the past, one for the tokens of this pass.
            past_mask = is_real[..., :-num_tokens].expand(-1, -1, num_tokens, -1)
            keywords = {
                "attention_mask": past_mask,
                "active_mask": active_mask,
                "past_key_value": past_key_value,
            }
        result = self.layer(hidden_states, position_ids=position_ids, **keywords)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def _refuse_other_device(self, device: torch.device) -> None:
        if (device.type == "cpu") != self._is_cpu_mode:
            raise TargetError(
                f"the port computes on {device}, which NxD was not told",
                expected=f"{CPU_MODE_VARIABLE}={int(device.type == 'cpu')}",
                found=f"{CPU_MODE_VARIABLE}={int(self._is_cpu_mode)}",
                next_step=f"Set {CPU_MODE_VARIABLE}=1 for --backend cpu, and only there.",
            )

    @property
    def convert_state_dict(self) -> Conversion:
        """The conversion that fills the layer."""
        return self._conversion

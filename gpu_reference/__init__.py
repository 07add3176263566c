"""The golden side: captures of the whole model on trusted hardware; the command `mm2-gpu`."""

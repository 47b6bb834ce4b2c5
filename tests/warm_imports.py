"""Loaded once by the server that the runs of test_robustness_faults.py are forked from: their imports take seconds."""

import av  # noqa: F401
import cv2  # noqa: F401
import lightning_fabric  # noqa: F401
import timm  # noqa: F401
import torch

import data.training  # noqa: F401
import data.video  # noqa: F401
import demo  # noqa: F401
import eval  # noqa: F401
import models.aot  # noqa: F401
import train  # noqa: F401
import utils.evaluation  # noqa: F401
import utils.run_folder  # noqa: F401

torch.set_num_threads(1)

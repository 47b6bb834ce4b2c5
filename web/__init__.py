"""The page of `python demo.py --web true`: draw masks, watch the tracking, correct it, export."""

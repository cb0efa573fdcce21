"""Lets AutoModel load this drafter with trust_remote_code=True; importing hf_specdraft does the same."""

import hf_specdraft

Eagle3Drafter = hf_specdraft.families()["specdraft_eagle3"]
Eagle3Config = Eagle3Drafter.config_class

"""Training drafters: data, features, objectives and a trainer on top of transformers.Trainer."""

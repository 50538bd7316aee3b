"""From rows in files to batches of tokens: `build.load_data`, then a `loader.Loader`."""

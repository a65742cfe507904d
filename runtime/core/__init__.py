"""Core of the runtime: context, configuration, options, state and errors, which every other room builds on."""

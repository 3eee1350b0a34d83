"""An OpenAI-compatible server in front of the engine: one thread owns the engine, an event loop
talks to clients.
"""

"""Plans and schedules: pure Python, importable without torch and ray."""

"""Stage two: students from a cache, without the teacher. Never imports stage one."""

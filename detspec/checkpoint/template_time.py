"""The time that chat templates print, where it must not be the clock's."""

import datetime

NO_TIME = datetime.datetime.min  # templates are given none


def template_time(created: int | None) -> datetime.datetime:
    """The time in a job that says it is `created`, seconds since 1970: the same whenever the job goes on, or none."""
    return NO_TIME if created is None else datetime.datetime.fromtimestamp(created, datetime.UTC)

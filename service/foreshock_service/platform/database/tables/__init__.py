"""Every table. Importing this package fills `Base.metadata`, which the migrations are compared with.

A new table: a module here, an import below, then
`python -m foreshock_service.platform.database.opening draft "what changes"`, which writes a migration into
`migrations/versions`. A test compares the migrated database with these classes.
"""

from foreshock_service.platform.database.tables.base import *  # noqa: F403
from foreshock_service.platform.database.tables.probes import *  # noqa: F403
from foreshock_service.platform.database.tables.runs import *  # noqa: F403
from foreshock_service.platform.database.tables.watch import *  # noqa: F403

# SPDX-License-Identifier: 0BSD
"""The library's ceiling: `websockets.serve` with the settings of server.py, sending every message back."""

import asyncio
import sys

from websockets.asyncio.server import ServerConnection, serve


async def echo(ws: ServerConnection) -> None:
    """Sends each message of one connection back."""
    async for message in ws:
        await ws.send(message)


async def main(port: int) -> None:
    """Serves on 127.0.0.1 until the process is ended."""
    async with serve(
        echo,
        "127.0.0.1",
        port,
        compression=None,
        max_size=2**24,
        max_queue=256,
        write_limit=2**17,
        ping_timeout=None,
        close_timeout=5.0,
        backlog=1024,
    ) as server:
        await server.serve_forever()


asyncio.run(main(int(sys.argv[1])))

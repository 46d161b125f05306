// SPDX-License-Identifier: 0BSD
// Plays an episode with Node's own WebSocket: node client.mjs ws://127.0.0.1:8000/ws
// Prints each reply, and how the socket was closed.

const requests = [
  { type: "reset", data: { task_id: "null", episode_id: "node" } },
  { type: "step", data: { answer: "done" } },
  { type: "state" },
  { type: "close" },
];

const socket = new WebSocket(process.argv[2]);
const sendNext = () => socket.send(JSON.stringify(requests.shift()));
socket.onopen = sendNext;
socket.onmessage = (event) => {
  console.log(event.data);
  sendNext();
};
socket.onclose = (event) => console.log(`closed ${event.code}`);
socket.onerror = (event) => {
  console.error(event.message);
  process.exitCode = 1;
};

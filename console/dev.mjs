// A server for people who work on the console: dist/ with the headers that the daemon sends, and the API from a unix socket.
//
//   node dev.mjs [--socket PATH] [--port N] [--role read|operate|admin] [--login]
//
// With --role or --login it answers /v1/session itself, so that pages can be tried with each role; --login asks for a token
// first (any token will do). Listens on the loopback interface only. Nothing of the product runs it.

import { readFileSync } from "node:fs";
import { createServer, request } from "node:http";
import { connect } from "node:net";
import { dirname, extname, join, normalize } from "node:path";
import { pipeline } from "node:stream";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const option = (name, otherwise) => {
  const at = process.argv.indexOf(`--${name}`);
  return at < 0 ? otherwise : process.argv[at + 1];
};
const dist = join(dirname(fileURLToPath(import.meta.url)), "dist");
const socketPath = option("socket", process.env.SPILLWAY_SOCKET ?? "/run/spillway/spillwayd.sock");
const port = Number(option("port", "9444"));
const role = option("role", "admin");
const isPretending = process.argv.includes("--role") || process.argv.includes("--login");
let isLoggedIn = !process.argv.includes("--login");

const CSP =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; " +
  "form-action 'none'; base-uri 'none'; frame-src 'self'; frame-ancestors 'self'";
const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".css": "text/css",
  ".txt": "text/plain; charset=utf-8",
};

function asset(path, response) {
  const name = normalize(path.slice("/console/".length) || "index.html");
  let bytes;
  try {
    if (name.includes("/") || name.startsWith(".")) throw new Error("no folders");
    bytes = readFileSync(join(dist, name));
  } catch {
    response.writeHead(404).end();
    return;
  }
  const csp =
    name === "serial.html" ? CSP.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'") : CSP;
  response.writeHead(200, {
    "Content-Type": TYPES[extname(name)] ?? "application/octet-stream",
    "Content-Encoding": "gzip",
    "Content-Security-Policy": csp,
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
  });
  response.end(gzipSync(bytes, { level: 9 }));
}

function session(from, response) {
  const json = (status, body) =>
    response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(body));
  if (from.method === "DELETE") {
    isLoggedIn = false;
    return json(200, {});
  }
  if (from.method === "POST") isLoggedIn = true;
  if (!isLoggedIn) {
    return json(401, {
      type: "/v1/problem-types/unauthenticated",
      title: "The caller is unknown",
      status: 401,
      detail: "Send a token that spillwayd knows.",
      code: "unauthenticated",
    });
  }
  json(200, {
    caller: "uid 0",
    role,
    by: process.argv.includes("--login") ? "session" : "socket",
    seconds_left: null,
  });
}

function relay(from, response) {
  const to = request(
    { socketPath, method: from.method, path: from.url, headers: { ...from.headers, host: "localhost" } },
    (answer) => {
      response.writeHead(answer.statusCode ?? 502, answer.headers);
      // A stream without events has headers all the same.
      response.flushHeaders();
      // Who is cut off is not kept waiting.
      pipeline(answer, response, () => {});
    },
  );
  to.on("error", () => {
    if (!response.headersSent) response.writeHead(502);
    response.end();
  });
  response.on("close", () => to.destroy());
  from.pipe(to);
}

const server = createServer((from, response) => {
  const { pathname } = new URL(from.url ?? "/", "http://localhost");
  if (pathname === "/") response.writeHead(303, { Location: "/console/" }).end();
  else if (isPretending && pathname === "/v1/session") session(from, response);
  else if (pathname.startsWith("/v1/")) relay(from, response);
  else if (pathname.startsWith("/console/")) asset(pathname, response);
  else response.writeHead(404).end();
});

server.on("upgrade", (from, client, head) => {
  const daemon = connect(socketPath, () => {
    const lines = from.rawHeaders.reduce((all, text, i) => all + (i % 2 ? `${text}\r\n` : `${text}: `), "");
    daemon.write(`${from.method} ${from.url} HTTP/1.1\r\n${lines}\r\n`);
    daemon.write(head);
    daemon.pipe(client).pipe(daemon);
  });
  daemon.on("error", () => client.destroy());
  client.on("error", () => daemon.destroy());
});

server.listen(port, "127.0.0.1", () => console.log(`http://127.0.0.1:${port}/console/`));

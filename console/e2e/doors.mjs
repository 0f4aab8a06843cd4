// Who is let in, and what they can do: the roles, the end of a session, pages of somebody else, names that lead here, and text that
// is made to be taken for HTML. Over TLS and by `spillway console`, before the same daemon.
//
// SPILLWAY_TLS_URL           the console over TLS; tokens with the names and values "read", "operate", "admin" exist
// SPILLWAY_CERT, _KEY        a certificate for localhost, for a server of somebody else on another port
import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createServer } from "node:https";
import { ask, axe, go, isCovered, launch, objects, open, pagesOf, say, signIn, spillway } from "./lib.mjs";

const { SPILLWAY_TLS_URL, SPILLWAY_CONSOLE_URL, SPILLWAY_CERT, SPILLWAY_KEY } = process.env;
const tls = new URL(SPILLWAY_TLS_URL);

const browser = await launch({ args: ["--host-resolver-rules=MAP rebound.example 127.0.0.1"] });
/** The generation of a machine's disk, which grows with each reset. */
const generation = (machine) => spillway("machine", "stats", machine).generation;
/** What acts would change: machines, which all run, and catalogs. */
const state = () =>
  JSON.stringify([
    spillway("machine", "list").items.map((m) => [
      m.name,
      m.power,
      m.status.run,
      m.claim,
      generation(m.name),
    ]),
    spillway("catalog", "list"),
  ]);

/** A page that is signed in over TLS; the errors that it brings about are `expected`. */
async function signedIn(token, expected) {
  const opened = await open(browser, {}, { fresh: true, at: SPILLWAY_TLS_URL, expected });
  await opened.page.goto(SPILLWAY_TLS_URL);
  await signIn(opened.page, token);
  return opened;
}

/** What a page's own script is answered by the API. */
const asks = (page, method, path, body) =>
  page.evaluate(
    async ([method, path, body]) => {
      const headers = body ? { "Content-Type": "application/json" } : {};
      return (await fetch(path, { method, headers, ...(body ? { body: JSON.stringify(body) } : {}) })).status;
    },
    [method, path, body],
  );
/** How a WebSocket of a page ends: "open", or why it was refused. */
const socket = (page, url) =>
  new Promise((resolve, reject) => {
    page.once("websocket", (socket) => {
      socket.once("framereceived", () => resolve("open"));
      socket.once("socketerror", resolve);
    });
    page.evaluate((url) => void new WebSocket(url), url).catch(reject);
  });
const consoleOf = (machine) => `wss://${tls.host}/v1/machines/${machine}/console`;

const ACTIONS = "/v1/machine-actions?wait=30";
const reset = (machine) => ({ action: "reset", select: { names: [machine] } });
/** Requests that change something; each of them succeeds for who may send it. */
const acts = ({ machine, catalog, image }) => [
  ["POST", ACTIONS, reset(machine)],
  ["POST", `/v1/catalogs/${catalog}/update`, { image }],
  ["POST", "/v1/catalogs", { name: "another", spec: { image, count: 1 } }],
  ["DELETE", "/v1/catalogs/another"],
  ["POST", `/v1/catalogs/${catalog}/claims`, { owner: "=" }],
];

/** Whether an act on a page succeeds. */
const succeeds = (act) =>
  act.then(
    () => true,
    () => false,
  );

async function roles() {
  say("the role read: no control works, and the API refuses too");
  const { context, page } = await signedIn("read", /status of 403|WebSocket connection/);
  const names = await objects(page);
  const before = state();
  const changes = [];
  page.on("request", (request) => {
    if (request.method() !== "GET") changes.push(`${request.method()} ${request.url()}`);
  });
  const pressed = new Set();
  /** Presses a button. One that is gone by then, or under another thing, is not counted. */
  const press = async (button, where) => {
    const label = await button.innerText({ timeout: 2000 }).catch(() => "");
    if (await succeeds(button.click({ timeout: 2000 }))) pressed.add(`${where} ${label}`);
  };
  for (const hash of pagesOf(names)) {
    await go(page, hash, SPILLWAY_TLS_URL);
    const inputs = page.locator("main input[type=checkbox]:visible:enabled");
    // Everything that can be chosen is, so that what is done with it is offered.
    for (let i = 0; i < Math.min(3, await inputs.count()); i++)
      await succeeds(inputs.nth(i).check({ timeout: 2000 }));
    const buttons = page.locator("main button:visible:enabled");
    for (let i = 0; i < (await buttons.count()); i++) {
      await press(buttons.nth(i), hash);
      const dialog = page.getByRole("dialog");
      if (await dialog.count()) {
        // A dialog may be read. What it confirms must not be sent.
        const confirm = dialog.locator("button:enabled");
        if (await confirm.count()) await press(confirm.last(), `${hash}, dialog:`);
        await page.keyboard.press("Escape");
      }
      if (!page.url().endsWith(hash)) await go(page, hash, SPILLWAY_TLS_URL);
    }
  }
  say(`pressed:\n  ${[...pressed].join("\n  ")}`);
  assert.ok(pressed.size > 20, `${pressed.size} buttons`);
  assert.deepEqual(changes, [], "no control changes anything");
  assert.equal(await asks(page, "GET", `/v1/machines/${names.machine}`), 200);
  for (const act of acts(names)) assert.equal(await asks(page, ...act), 403, String(act));
  assert.match(await socket(page, consoleOf(names.machine)), / 403$/);
  assert.equal(state(), before);
  await context.close();
}

async function endOfSession() {
  say("a session ends with its token, in the middle of a page");
  const { context, page } = await signedIn("operate", /status of 401 /);
  await go(page, "#/machines", SPILLWAY_TLS_URL);
  await page.waitForSelector("tbody th");
  await ask("remove the token operate");
  await page.getByRole("dialog", { name: "Your session has ended" }).waitFor({ timeout: 15_000 });
  assert.equal(await isCovered(page), true, "what was shown is not shown any more");
  assert.equal(await asks(page, "GET", "/v1/machines"), 401);
  assert.deepEqual(await axe(page), []);
  await context.close();
}

async function whoMay() {
  say("the role admin: the same requests do what they say");
  const { context, page } = await signedIn("admin", /WebSocket connection/);
  const names = await objects(page);
  const before = generation(names.machine);
  for (const act of acts(names)) assert.equal(await asks(page, ...act), 200, String(act));
  assert.ok(generation(names.machine) > before, "the machine was reset");
  const claimed = spillway("machine", "list").items.filter(({ claim }) => claim?.owner === "=");
  assert.equal(claimed.length, 1);
  spillway("machine", "release", claimed[0].name);
  // Machines without a guest have no console: that is another answer than to who may not open one.
  assert.match(await socket(page, consoleOf(names.machine)), / 409$/);
  await context.close();
}

/** A server of somebody else, on another port of this host: the same site, with empty pages. */
async function elsewhere() {
  const identity = { cert: readFileSync(SPILLWAY_CERT), key: readFileSync(SPILLWAY_KEY) };
  const server = createServer(identity, (_, answer) => {
    answer.setHeader("Content-Type", "text/html");
    answer.end("<!doctype html><title>x</title><body></body>");
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return server;
}

/** What a foreign page tries; what it is told. No attempt is wrong but in where it comes from. */
const attack = (page, machine, catalog) =>
  page.evaluate(
    async ([origin, path, body, claims]) => {
      const post = (path, init) =>
        fetch(origin + path, { method: "POST", credentials: "include", ...init }).then(
          (answer) => answer.status || answer.type,
          () => "failed",
        );
      // Text without a type is sent without asking the server first, and the daemon would take it for JSON.
      const untyped = (value) => new Blob([JSON.stringify(value)]);
      const said = {};
      said.read = await fetch(`${origin}/v1/machines`, { credentials: "include" }).then(
        (answer) => answer.text(),
        () => "failed",
      );
      const headers = { "Content-Type": "application/json" };
      said.json = await post(path, { headers, body: JSON.stringify(body) });
      said.text = await post(path, { mode: "no-cors", body: JSON.stringify(body) });
      said.untyped = await post(path, { mode: "no-cors", body: untyped(body) });
      said.login = await post("/v1/session", { mode: "no-cors", body: untyped({ token: "read" }) });
      const events = new EventSource(`${origin}/v1/event-stream`, { withCredentials: true });
      said.events = await new Promise((resolve) => {
        for (const name of ["open", "message", "error"]) events.addEventListener(name, () => resolve(name));
      });
      const make = (tag, fields) =>
        document.body.appendChild(Object.assign(document.createElement(tag), fields));
      make("iframe", { name: "hidden" });
      const form = { method: "post", action: origin + claims, target: "hidden", enctype: "text/plain" };
      const claim = make("form", form);
      // Such a form sends NAME=VALUE: {"owner":"="}
      claim.append(Object.assign(document.createElement("input"), { name: '{"owner":"', value: '"}' }));
      claim.submit();
      make("iframe", { name: "console", src: `${origin}/console/` });
      await new Promise((resolve) => setTimeout(resolve, 3000));
      return said;
    },
    [tls.origin, ACTIONS, reset(machine), `/v1/catalogs/${catalog}/claims`],
  );

async function otherOrigins() {
  say("a page on another port of this host: the same site, with the user's cookie");
  const { context, page } = await signedIn("admin");
  const { machine, catalog } = await objects(page);
  const server = await elsewhere();
  const evil = await context.newPage();
  await evil.goto(`https://localhost:${server.address().port}/`);
  let claim;
  evil.on("request", (request) => {
    if (request.url().endsWith("/claims")) claim = request;
  });
  const first = generation(machine);
  assert.equal(await asks(page, "POST", ACTIONS, reset(machine)), 200);
  assert.ok(generation(machine) > first, "the console's own page resets the machine");
  const before = state();
  assert.deepEqual(await attack(evil, machine, catalog), {
    read: "failed",
    json: "failed",
    text: "opaque",
    untyped: "opaque",
    login: "opaque",
    events: "error",
  });
  assert.match(await socket(evil, consoleOf(machine)), / 403$/);
  assert.match((await claim.allHeaders()).cookie, /^__Host-spillway=/, "the browser sends the cookie");
  assert.equal(
    await evil.frame("console").locator(".shell, main").count(),
    0,
    "the console is in no foreign frame",
  );
  assert.equal(state(), before, "nothing has been done");
  // Nobody was signed in under another name either.
  assert.equal(await page.evaluate(async () => (await (await fetch("/v1/session")).json()).caller), "admin");
  server.close();
  await context.close();
}

async function rebinding() {
  say("a name of somebody else that leads to this host");
  const address = new URL(SPILLWAY_CONSOLE_URL);
  address.hostname = "rebound.example";
  const { context, page } = await open(
    browser,
    {},
    { fresh: true, at: address.href, expected: /status of 421 / },
  );
  const answer = await page.goto(address.href);
  assert.equal(answer.status(), 421);
  assert.match(await page.locator("body").innerText(), /127\.0\.0\.1/);
  assert.deepEqual(await context.cookies(), [], "the key is not spent on it, and no cookie is set");
  await context.close();
  // The address still works for who has it.
  const own = await open(browser, {}, { fresh: true });
  await own.page.goto(SPILLWAY_CONSOLE_URL);
  await own.page.getByRole("heading", { name: "Host", level: 1 }).waitFor();
  await own.context.close();
}

/** Text that would show a dialog if it were taken for HTML. */
const HOSTILE = "<img src=x onerror=alert(1)>";

async function hostileTexts() {
  say("text that is made to be taken for HTML");
  const { context, page } = await signedIn("admin", /status of 40[04] /);
  await page.addInitScript(() => {
    globalThis.taken = [];
    globalThis.alert = (text) => globalThis.taken.push(text);
  });
  await page.reload();
  // An event says who has claimed a machine.
  const { name: machine } = spillway("machine", "claim", "desk", "--owner", HOSTILE, "--wait");
  for (const hash of [
    "#/images/hostile",
    "#/operations",
    "#/events",
    `#/machines/${machine}?tab=events`,
    "#/",
  ]) {
    await go(page, hash, SPILLWAY_TLS_URL);
    await page.getByText(HOSTILE).first().waitFor();
    assert.equal(await page.locator("main img, main script").count(), 0, hash);
  }
  for (const hash of [
    "#/machines?filter=<img src=x onerror=alert(1)>",
    "#/machines/<img src=x onerror=alert(1)>",
    "#/catalogs/%3Cscript%3Ealert(1)%3C%2Fscript%3E?tab=events",
    "#/catalogs/__proto__?tab=constructor",
    "#/%00/%ff?%=%&a",
  ]) {
    await page.goto(`${SPILLWAY_TLS_URL}${hash}`);
    await page.waitForSelector("h1");
    assert.equal(await page.locator("main img, main script").count(), 0, hash);
  }
  assert.deepEqual(await page.evaluate(() => globalThis.taken), []);
  spillway("machine", "release", machine);
  await context.close();
}

try {
  await rebinding();
  await roles();
  await otherOrigins();
  await whoMay();
  await hostileTexts();
  await endOfSession();
  say("done");
} finally {
  await browser.close();
}

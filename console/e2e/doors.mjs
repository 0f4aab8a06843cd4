// Who is let in, and what they can do: the roles, the end of a session, pages of somebody else, names that lead here, and text that
// is made to be taken for HTML. Over TLS and by `spillway console`, before the same daemon.
//
// SPILLWAY_TLS_URL           the console over TLS; tokens with the names and values "read", "operate", "admin" exist
// SPILLWAY_CERT, _KEY        a certificate for localhost, for a server of somebody else on another port
import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createServer } from "node:https";
import { ask, assertClean, axe, go, launch, objects, open, pagesOf, say, signIn, spillway } from "./lib.mjs";

const { SPILLWAY_TLS_URL, SPILLWAY_CONSOLE_URL, SPILLWAY_CERT, SPILLWAY_KEY } = process.env;
const tls = new URL(SPILLWAY_TLS_URL);

const browser = await launch({ args: ["--host-resolver-rules=MAP rebound.example 127.0.0.1"] });
const state = () =>
  JSON.stringify(spillway("machine", "list").items.map((m) => [m.name, m.power, m.status.run, m.claim]));

/** A page that is signed in over TLS. */
async function signedIn(token) {
  const opened = await open(browser, {}, { fresh: true });
  await opened.page.goto(SPILLWAY_TLS_URL);
  await signIn(opened.page, token);
  return opened;
}

/** What a page's own script is answered by the API. */
const asks = (page, method, path) =>
  page.evaluate(
    async ([method, path]) => {
      const headers = { "Content-Type": "application/json" };
      const answer = await fetch(path, { method, headers, ...(method === "GET" ? {} : { body: "{}" }) });
      return answer.status;
    },
    [method, path],
  );
/** How a WebSocket of a page ends: "open", or "refused". */
const socket = (page, url) =>
  page.evaluate(
    (url) =>
      new Promise((resolve) => {
        const socket = new WebSocket(url);
        socket.onopen = () => resolve("open");
        socket.onerror = () => resolve("refused");
      }),
    url,
  );

async function roles() {
  say("the role read: no control works, and the API refuses too");
  const { context, page, seen } = await signedIn("read");
  const names = await objects(page);
  const before = state();
  const changes = [];
  page.on("request", (request) => {
    if (request.method() !== "GET") changes.push(`${request.method()} ${request.url()}`);
  });
  let pressed = 0;
  for (const hash of pagesOf(names)) {
    await go(page, hash, SPILLWAY_TLS_URL);
    const inputs = page.locator("main input[type=checkbox]:visible:enabled");
    // Everything that can be chosen is, so that what is done with it is offered.
    for (let i = 0; i < Math.min(3, await inputs.count()); i++)
      await inputs
        .nth(i)
        .check({ timeout: 2000 })
        .catch(() => {});
    const labels = await page.locator("main button:visible:enabled").allInnerTexts();
    for (let i = 0; i < labels.length; i++) {
      const button = page.locator("main button:visible:enabled").nth(i);
      if ((await button.count()) === 0) continue;
      await button.click({ timeout: 2000 }).catch(() => {});
      pressed++;
      const dialog = page.getByRole("dialog");
      if (await dialog.count()) {
        // A dialog may be read. What it confirms must not be sent.
        const confirm = dialog.locator("button:enabled");
        if (await confirm.count())
          await confirm
            .last()
            .click({ timeout: 2000 })
            .catch(() => {});
        await page.keyboard.press("Escape");
      }
      if (!page.url().endsWith(hash)) await go(page, hash, SPILLWAY_TLS_URL);
    }
  }
  assert.ok(pressed > 20, `${pressed} buttons`);
  assert.deepEqual(changes, [], "no control changes anything");
  assert.equal(await asks(page, "GET", `/v1/machines/${names.machine}`), 200);
  for (const path of [
    `/v1/machines/${names.machine}/reset`,
    `/v1/machines/${names.machine}/stop`,
    `/v1/catalogs/${names.catalog}/update`,
    "/v1/claims",
  ])
    assert.ok([403, 404].includes(await asks(page, "POST", path)), `POST ${path}`);
  assert.equal(await asks(page, "POST", `/v1/machines/${names.machine}/reset`), 403);
  assert.equal(await asks(page, "DELETE", `/v1/machines/${names.machine}`), 403);
  assert.equal(await socket(page, `wss://${tls.host}/v1/machines/${names.machine}/console`), "refused");
  assert.equal(state(), before);
  assertClean(seen, SPILLWAY_TLS_URL, /status of 403|WebSocket connection/);
  await context.close();
  say(`${pressed} buttons pressed`);
}

async function endOfSession() {
  say("a session ends with its token, in the middle of a page");
  const { context, page } = await signedIn("operate");
  await go(page, "#/machines", SPILLWAY_TLS_URL);
  await page.waitForSelector("tbody th");
  await ask("remove the token operate");
  await page.waitForSelector("main.login", { timeout: 15_000 });
  assert.match(await page.locator("main").innerText(), /The session has ended/);
  assert.equal(await page.locator("tbody").count(), 0, "what was shown is not shown any more");
  assert.equal(await asks(page, "GET", "/v1/machines"), 401);
  assert.deepEqual(await axe(page), []);
  await context.close();
}

async function otherOrigins() {
  say("a page on another port of this host: the same site, with the user's cookie");
  const { context, page } = await signedIn("admin");
  const { machine } = await objects(page);
  const before = state();
  const server = createServer(
    { cert: readFileSync(SPILLWAY_CERT), key: readFileSync(SPILLWAY_KEY) },
    (_, answer) => {
      answer.setHeader("Content-Type", "text/html");
      answer.end("<!doctype html><title>x</title><body></body>");
    },
  );
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const evil = await context.newPage();
  await evil.goto(`https://localhost:${server.address().port}/`);
  const tried = await evil.evaluate(
    async ([origin, machine]) => {
      const said = {};
      const post = (path, init) =>
        fetch(origin + path, { method: "POST", credentials: "include", ...init }).then(
          (answer) => answer.status || answer.type,
          () => "failed",
        );
      const reset = `/v1/machines/${machine}/reset`;
      said.read = await fetch(`${origin}/v1/machines`, { credentials: "include" }).then(
        (answer) => answer.text(),
        () => "failed",
      );
      said.json = await post(reset, { headers: { "Content-Type": "application/json" }, body: "{}" });
      said.simple = await post(reset, {
        mode: "no-cors",
        headers: { "Content-Type": "text/plain" },
        body: "{}",
      });
      said.empty = await post(reset, { mode: "no-cors" });
      said.login = await post("/v1/session", { mode: "no-cors", body: JSON.stringify({ token: "read" }) });
      const opens = (make, ...names) =>
        new Promise((resolve) => {
          const made = make();
          for (const name of names) made.addEventListener(name, () => resolve(name));
        });
      said.socket = await opens(
        () => new WebSocket(`${origin.replace("https", "wss")}/v1/machines/${machine}/console`),
        "open",
        "error",
      );
      said.events = await opens(
        () => new EventSource(`${origin}/v1/event-stream`, { withCredentials: true }),
        "open",
        "message",
        "error",
      );
      const form = Object.assign(document.createElement("form"), {
        method: "post",
        action: origin + reset,
        target: "hidden",
      });
      const frame = Object.assign(document.createElement("iframe"), { name: "hidden" });
      document.body.append(frame, form);
      form.submit();
      await new Promise((resolve) => setTimeout(resolve, 1500));
      const console = Object.assign(document.createElement("iframe"), {
        src: `${origin}/console/`,
        name: "console",
      });
      document.body.append(console);
      await new Promise((resolve) => setTimeout(resolve, 1500));
      return said;
    },
    [tls.origin, machine],
  );
  assert.deepEqual(tried, {
    read: "failed",
    json: "failed",
    simple: "opaque",
    empty: "opaque",
    login: "opaque",
    socket: "error",
    events: "error",
  });
  const framed = evil.frame("console");
  assert.equal(
    await framed
      .locator(".shell, main")
      .count()
      .catch(() => 0),
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
  const { context, page } = await open(browser, {}, { fresh: true });
  address.hostname = "rebound.example";
  const answer = await page.goto(address.href);
  assert.equal(answer.status(), 421);
  assert.match(await page.locator("body").innerText(), /127\.0\.0\.1/);
  assert.deepEqual(await context.cookies(), [], "the key is not spent on it, and no cookie is set");
  // The address still works for who has it.
  await page.goto(SPILLWAY_CONSOLE_URL);
  await page.getByRole("heading", { name: "Host", level: 1 }).waitFor();
  await context.close();
}

async function hostileTexts() {
  say("text that is made to be taken for HTML");
  const { context, page, seen } = await signedIn("admin");
  await page.addInitScript(() => {
    globalThis.taken = [];
    globalThis.alert = (text) => globalThis.taken.push(text);
  });
  await page.reload();
  for (const hash of ["#/images/hostile", "#/operations", "#/events", "#/images"]) {
    await go(page, hash, SPILLWAY_TLS_URL);
    if (hash !== "#/images" && hash !== "#/events")
      await page.getByText("<img src=x onerror=alert(1)>").first().waitFor();
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
  assertClean(seen, SPILLWAY_TLS_URL, /status of 40[04] /);
  await context.close();
}

try {
  await rebinding();
  await roles();
  await otherOrigins();
  await hostileTexts();
  await endOfSession();
  say("done");
} finally {
  await browser.close();
}

// One machine and its user: claimed, written to, released, and everything is forgotten. Its serial console takes what is hostile and
// survives being enlarged; a key that is pressed on its screen changes pixels.
//
// Catalogs "desk", of guests that answer on their consoles, and "screen", whose machine shows each key that is pressed, are there.
import assert from "node:assert/strict";
import { axeInThemes, excess, go, launch, open, say, spillway, tellFailure } from "./lib.mjs";

const BOOT_MS = 400_000;

const browser = await launch();
// A disk that is not served while its machine is reset cannot say how long its requests took.
const { context, page } = await open(browser, {}, { expected: /409 \(Conflict\) .*\/(latency|dirty-ranges)/ });
page.setDefaultTimeout(30_000);
const sockets = [];
page.on("websocket", (socket) => sockets.push(socket.url()));

/** Enlarges the console in the page's frame and makes it small again; its connection stays the one it was. */
async function enlarge(frame) {
  const before = sockets.length;
  await frame.getByRole("button", { name: "Enlarge" }).click();
  await frame.getByRole("button", { name: "Make smaller" }).click();
  await frame.getByRole("button", { name: "Enlarge" }).waitFor();
  assert.equal(sockets.length, before, "the connection stays");
}

/** The tab with a console, and the document in it, are accessible in both themes, and as wide as a screen, also a narrow one. */
async function assertAccessible(name) {
  const { width, height } = page.viewportSize();
  const frame = page.frames().find((frame) => frame.url().includes(name));
  for (const wide of [width, 390]) {
    await page.setViewportSize({ width: wide, height });
    for (const place of [page, frame]) {
      assert.deepEqual(await axeInThemes(page, place), [], `${name}, ${wide} pixels`);
      assert.ok((await excess(place)) <= 0, `${name}, ${wide} pixels`);
    }
    if (process.env.SPILLWAY_SHOTS) {
      await page.emulateMedia({ colorScheme: "dark" });
      await page.screenshot({ path: `${process.env.SPILLWAY_SHOTS}/${name}-dark-${wide}.png` });
    }
  }
  await page.setViewportSize({ width, height });
}

async function typed(serial, line, answer) {
  await serial.locator("textarea").pressSequentially(`${line}\n`);
  await serial.getByText(answer).first().waitFor({ timeout: 60_000 });
}

/** The console takes Tab for itself; Ctrl+] leads out of it, and a button back in. */
async function leave(frame, taker, name) {
  const button = frame.getByRole("button", { name });
  const isFocused = (what) => what.evaluate((element) => element.ownerDocument.activeElement === element);
  await button.focus();
  await page.keyboard.press("Enter");
  assert.ok(await isFocused(taker), "the button leads in");
  await page.keyboard.press("Tab");
  assert.ok(await isFocused(taker), "Tab is the guest's");
  await page.keyboard.press("Control+]");
  assert.ok(await isFocused(button), "Ctrl+] leads out");
  await page.keyboard.press("Tab");
  assert.ok(!(await isFocused(taker)), "Tab does not lead in");
}

async function claimAndRelease() {
  say("a machine is claimed");
  await go(page, "#/catalogs/desk");
  await page.getByRole("row", { name: /desk-001.*ready/ }).waitFor({ timeout: BOOT_MS });
  await page.getByRole("button", { name: "Claim one" }).click();
  const dialog = page.getByRole("dialog");
  assert.deepEqual(await axeInThemes(page), []);
  await dialog.getByLabel("Owner").fill("<b>ann</b>");
  await dialog.getByRole("button", { name: "Claim", exact: true }).click();
  await dialog.waitFor({ state: "detached" });
  assert.equal(spillway("machine", "show", "desk-001").claim.owner, "<b>ann</b>");

  say("its user writes");
  await go(page, "#/machines/desk-001?tab=serial");
  const serial = page.frameLocator("iframe.console");
  await serial.getByText("WORKS").first().waitFor();
  await typed(serial, "marksecret a", "MARKED #a");
  await typed(serial, "state b", /mark=secret .*#b/);

  say("its user logs in at a prompt, with a password");
  // A line of the screen. For screen readers the console has the same text a second time.
  const lines = (text) => serial.locator(".xterm-rows > div", { hasText: text });
  const prompt = (text, number) => lines(text).nth(number).waitFor({ timeout: 60_000 });
  await typed(serial, "login e", /login:/);
  await typed(serial, "ann", /^Password:/);
  await typed(serial, "wrong", "Login incorrect");
  await prompt(/login:/, 1);
  await serial.locator("textarea").pressSequentially("ann\n");
  await prompt(/^Password:/, 1);
  await typed(serial, "sesame", /^\S+ \$/);
  await typed(serial, "echo I am $(id -u)", "I am 1000");
  assert.equal(await serial.getByText("sesame").count(), 0, "a password is not shown");
  await typed(serial, "exit", "LEFT #e");

  say("bytes of a guest that are made to do harm");
  const hostile = "\u001b]8;;https://evil.example/\u0007LINK\u001b]8;;\u0007\u001b]0;owned\u0007\u001b[6n\u001b]52;c;b3duZWQ=\u0007<img src=x onerror=alert(1)>";
  await serial.locator("textarea").evaluate((area, text) => {
    const data = new DataTransfer();
    data.setData("text/plain", `state c${text}\r`);
    area.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
  }, hostile);
  await serial
    .getByText(/#c.*<img src=x onerror=alert\(1\)>/)
    .first()
    .waitFor({ timeout: 60_000 });
  assert.equal(await serial.locator("img").count(), 0);
  const asked = [];
  page.on("dialog", (asks) => {
    asked.push(asks.message());
    void asks.dismiss();
  });
  const link = await serial.locator(".xterm-rows").evaluate((rows) => {
    const range = document.createRange();
    const texts = document.createTreeWalker(rows, NodeFilter.SHOW_TEXT);
    let found = null;
    while (texts.nextNode()) {
      const at = texts.currentNode.data.indexOf("LINK");
      if (at < 0) continue;
      range.setStart(texts.currentNode, at);
      range.setEnd(texts.currentNode, at + 4);
      const { x, y, width, height } = range.getBoundingClientRect();
      found = { x: x + width / 2, y: y + height / 2 };
    }
    return found;
  });
  assert.ok(link, "the text of the link is shown");
  const frame = await page.locator("iframe.console").boundingBox();
  await page.mouse.move(frame.x + link.x, frame.y + link.y);
  await page.waitForTimeout(300);
  await page.mouse.click(frame.x + link.x, frame.y + link.y);
  await page.waitForTimeout(300);
  assert.deepEqual(asked, [], "it is no link");
  assert.doesNotMatch(await page.title(), /owned/);
  await typed(serial, "state d", /STATE .*#d/);
  await leave(serial, serial.locator("textarea"), /^Go to the console/);
  await enlarge(serial);

  say("it is released, and forgets");
  const before = spillway("machine", "show", "desk-001").status.run.vmm_pid;
  await page.getByRole("link", { name: "Disk" }).click();
  await page.getByText("<b>ann</b>").first().waitFor();
  await page.getByRole("button", { name: "Release" }).click();
  await dialog.getByRole("button", { name: "Release", exact: true }).click();
  await dialog.waitFor({ state: "detached" });
  const until = Date.now() + BOOT_MS;
  for (;;) {
    const { status, claim } = spillway("machine", "show", "desk-001");
    if (claim === null && status.ready && status.run.vmm_pid !== before) break;
    assert.ok(Date.now() < until, "it does not come back");
    await page.waitForTimeout(1000);
  }
  await page.getByRole("link", { name: "Serial" }).click();
  await serial.locator("textarea").waitFor();
  await typed(serial, "state e", /mark= .*#e/);
  await assertAccessible("serial.html");
}

/** What the screen shows, as bytes of a picture; once it is the same for a second. */
async function shown(frame) {
  const picture = () => frame.locator("canvas").evaluate((canvas) => canvas.toDataURL());
  for (let last = await picture(); ; ) {
    await page.waitForTimeout(1000);
    const now = await picture();
    if (now === last) return now;
    last = now;
  }
}

async function screen() {
  say("a key on the screen of a machine");
  // Its firmware has handed over to what is on its disk.
  for (const until = Date.now() + BOOT_MS; !spillway("machine", "show", "screen-001").status.ready; ) {
    assert.ok(Date.now() < until, "its disk does not boot");
    await page.waitForTimeout(500);
  }
  await go(page, "#/machines/screen-001?tab=screen");
  const frame = page.frameLocator("iframe.console");
  await frame.getByText("Connected").waitFor();
  const before = await shown(frame);
  assert.equal(await shown(frame), before, "nothing changes by itself");
  await frame.locator("canvas").click();
  const pictures = [before];
  for (const key of ["a", "b"]) {
    await page.keyboard.press(key);
    let now = before;
    for (const until = Date.now() + 60_000; pictures.includes(now) && Date.now() < until; )
      now = await shown(frame);
    assert.ok(!pictures.includes(now), `the key ${key} changes pixels`);
    pictures.push(now);
  }
  await leave(frame, frame.locator("canvas"), /^Go to the screen/);
  await enlarge(frame);
  await assertAccessible("screen.html");
}

try {
  await screen();
  await claimAndRelease();
  await context.close();
  say("done");
} catch (error) {
  await tellFailure(browser, error);
  if (process.env.SPILLWAY_SHOTS)
    await page.screenshot({ path: `${process.env.SPILLWAY_SHOTS}/machine.png` });
  throw error;
} finally {
  await browser.close();
}

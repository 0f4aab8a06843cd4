import "./dom.ts";
import assert from "node:assert/strict";
import { test } from "node:test";
import type { CatalogSpec } from "../src/api/client.ts";
import { settings } from "../src/pages/new-catalog-review.tsx";
import { needs } from "../src/pages/new-catalog-steps.tsx";
import {
  changeDraft,
  clearDraft,
  clearEdits,
  differing,
  draftKey,
  editsOf,
  isUnsaved,
  name,
} from "../src/state/edits.ts";
import { isOver } from "../src/state/session.ts";

test("the same draft is sent with the same key, and another one with another", () => {
  name.value = "desk";
  changeDraft("image", "debian");
  const key = draftKey();
  assert.match(key, /^[0-9a-f]{32}$/);
  assert.equal(draftKey(), key, "after a lost answer");
  changeDraft("count", 3);
  const other = draftKey();
  assert.notEqual(other, key);
  clearDraft();
  name.value = "desk";
  changeDraft("image", "debian");
  changeDraft("count", 3);
  assert.notEqual(draftKey(), other, "a draft that was made is another one when it is filled in again");
  clearDraft();
});

test("what is filled in and not applied is known, as long as the session goes on", () => {
  assert.equal(isUnsaved(), false);
  changeDraft("user_data", "secret");
  assert.equal(isUnsaved(), true);
  changeDraft("user_data", "");
  assert.equal(isUnsaved(), false);
  editsOf("desk").wrong.value = { ram_bytes: "12 bananas" };
  assert.equal(isUnsaved(), true);
  clearEdits(editsOf("desk"));
  editsOf("desk").changes.value = { count: 4 };
  assert.equal(editsOf("desk").changes.value.count, 4, "it is there when somebody comes back");
  assert.deepEqual(editsOf("lab").changes.value, {});
  isOver.value = true;
  assert.equal(isUnsaved(), false, "nothing holds back the page of a session that is over");
  isOver.value = false;
  clearEdits(editsOf("desk"));
  assert.equal(isUnsaved(), false);
});

test("a change is what differs from the catalog", () => {
  const spec = { image: "debian", count: 3, ready: null, labels: { a: "1" } } as unknown as CatalogSpec;
  assert.deepEqual(differing({ count: 3, ready: undefined, labels: { a: "1" } }, spec), {});
  assert.deepEqual(differing({ kernel: null }, spec), {}, "what is absent is null in other responses");
  assert.deepEqual(differing({ count: 4, labels: {} }, spec), { count: 4, labels: {} });
});

test("the review shows what the daemon would use for what was left empty", () => {
  const effective = {
    image: "debian",
    count: 2,
    ram_bytes: 2 ** 28,
    overflow_bytes: null,
    user_data: "#cloud-config",
    autostart: false,
    labels: {},
  } as unknown as CatalogSpec;
  const of = settings({ image: "debian", count: 2, user_data: "#cloud-config" }, effective);
  assert.deepEqual(
    of.map((s) => `${s.title} ${s.text}${s.isDefault ? " (default)" : ""}`),
    [
      "Machines 2",
      "Start with the daemon no (default)",
      "RAM tier 256M (default)",
      "User data for cloud-init given",
    ],
  );
  assert.deepEqual(
    settings({ count: 2 }, null).map((s) => s.title),
    ["Machines"],
  );
});

test("what a catalog needs is known when its limits are", () => {
  assert.deepEqual(needs({ count: 3, ram_bytes: 4, overflow_bytes: 5 }), { count: 3, ram: 12, overflow: 15 });
  assert.deepEqual(needs({ count: 3, ram_bytes: null, overflow_bytes: null }), {
    count: 3,
    ram: 0,
    overflow: 0,
  });
  assert.equal(needs({ count: 3, ram_bytes: 4 }), null);
  assert.equal(needs({ count: 3, overflow_bytes: 5 }), null);
});

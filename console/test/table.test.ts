import "./dom.ts";
import assert from "node:assert/strict";
import { test } from "node:test";
import { hold, inPlace, range } from "../src/ui/table.tsx";

test("a range is of names, wherever the rows are by now", () => {
  assert.deepEqual(range(["a", "b", "c", "d"], "b", "d"), ["b", "c", "d"]);
  assert.deepEqual(range(["a", "b", "c", "d"], "d", "b"), ["b", "c", "d"]);
  // The table has sorted itself since the first click.
  assert.deepEqual(range(["d", "b", "a", "c"], "b", "a"), ["b", "a"]);
  assert.deepEqual(range(["a", "c"], "b", "c"), ["c"], "the first is not shown any more");
  assert.deepEqual(range(["a", "c"], null, "c"), ["c"]);
});

test("rows keep their places, and others follow", () => {
  const id = (row: { name: string }) => row.name;
  const rows = ["new", "c", "a", "b", "other"].map((name) => ({ name }));
  assert.deepEqual(inPlace(rows, id, ["a", "b", "gone", "c"]).map(id), ["a", "b", "c", "new", "other"]);
});

test("places are held from the first row that is chosen until none is, or the sort changes", () => {
  assert.equal(hold(null, false, "fill", ["a", "b"]), null);
  const first = hold(null, true, "fill", ["a", "b"]);
  assert.deepEqual(first?.places, ["a", "b"]);
  assert.equal(hold(first, true, "fill", ["b", "a"]), first, "the table sorts itself");
  assert.deepEqual(hold(first, true, "-fill", ["b", "a"])?.places, ["b", "a"]);
  assert.equal(hold(first, false, "fill", ["b", "a"]), null);
});

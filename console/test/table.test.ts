import "./dom.ts";
import assert from "node:assert/strict";
import { test } from "node:test";
import { hold, inPlace, orderOf, partsOf, range, reorder } from "../src/ui/table.tsx";

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

test("places are held from when they are, until the sort changes", () => {
  const first = hold(null, "fill", ["a", "b"]);
  assert.deepEqual(first.places, ["a", "b"]);
  assert.equal(hold(first, "fill", ["b", "a"]), first, "the table sorts itself");
  assert.deepEqual(hold(first, "-fill", ["b", "a"]).places, ["b", "a"]);
});

test("rows without a key come last in either direction, and equal ones stay as they were", () => {
  assert.deepEqual(orderOf([1, null, 3, undefined, 1], 1), [0, 4, 2, 1, 3]);
  assert.deepEqual(orderOf([1, null, 3, undefined, 1], -1), [2, 0, 4, 1, 3]);
  assert.deepEqual(orderOf(["pc-10", "pc-9", "PC-8"], 1), [2, 1, 0], "numbers in a text count as numbers");
});

test("keys are sorted when they change", () => {
  const first = reorder(null, [2, 1], 1);
  assert.deepEqual(first.indexes, [1, 0]);
  assert.equal(reorder(first, [2, 1], 1), first);
  assert.deepEqual(reorder(first, [2, 1], -1).indexes, [0, 1]);
  assert.deepEqual(reorder(first, [1, 2], 1).indexes, [0, 1]);
  assert.deepEqual(reorder(first, [2, 1, 0], 1).indexes, [2, 1, 0]);
});

test("a body draws what can be seen, and the row that has the focus", () => {
  const places = (from: number, to: number) =>
    Array.from({ length: to - from }, (_, i) => ({ place: from + i }));
  assert.deepEqual(partsOf(3, 0, 3, null), places(0, 3));
  assert.deepEqual(partsOf(9, 0, 3, 1), [...places(0, 3), { space: 6 }]);
  assert.deepEqual(partsOf(9, 4, 6, null), [{ space: 4 }, ...places(4, 6), { space: 3 }]);
  const before = [{ space: 1 }, { place: 1 }, { space: 2 }, ...places(4, 6), { space: 3 }];
  assert.deepEqual(partsOf(9, 4, 6, 1), before);
  assert.deepEqual(partsOf(9, 4, 6, 3), [{ space: 3 }, ...places(3, 6), { space: 3 }]);
  assert.deepEqual(partsOf(9, 4, 6, 8), [{ space: 4 }, ...places(4, 6), { space: 2 }, { place: 8 }]);
  assert.deepEqual(partsOf(3, 80, 90, null), [{ space: 2 }, { place: 2 }], "the list has become shorter");
  assert.deepEqual(partsOf(0, 0, 60, null), []);
});

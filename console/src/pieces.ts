// Several requests that belong to one act, one after the other.
//
// Invariant: what it says of an act is true of each part: recorded, refused, not known or not asked for.
import { ApiError, words } from "./api/client.ts";
import { count, plural } from "./ui/format.ts";

/** Some parts are done and others not: the message says of each what has become of it. */
export class PartlyDone extends Error {}

export interface Piece {
  /** The machines that it is about, in words. */
  what: string;
  /** How many these are. */
  size: number;
  send(): Promise<unknown>;
}

/** Sends all pieces, and tells how many machines are done after each. Fails if one is refused, with what has become of all. */
export async function inTurn(pieces: Piece[], tell: (done: number) => void): Promise<void> {
  const all = pieces.reduce((n, piece) => n + piece.size, 0);
  const problems: string[] = [];
  let done = 0;
  let left = all;
  for (const { what, size, send } of pieces) {
    try {
      await send();
      done += size;
      if (pieces.length > 1) tell(done);
    } catch (error) {
      if (pieces.length === 1) throw error;
      if (error instanceof ApiError) problems.push(`Refused for ${count(size)} (${what}): ${words(error)}`);
      else {
        problems.push(`Not known for ${count(size)} (${what}): ${words(error)}`);
        if (left > size) problems.push(`Not asked for the other ${count(left - size)}.`);
        break;
      }
    }
    left -= size;
  }
  if (problems.length) {
    throw new PartlyDone(`Recorded for ${count(done)} of ${plural(all, "machine")}. ${problems.join(" ")}`);
  }
}

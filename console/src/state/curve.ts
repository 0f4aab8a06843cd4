// Reading of sizing curves: what other sizes of the RAM tier would have done, of one disk or of several.
//
// Invariant: between two points of a curve the answer is interpolated, as the daemon does; beyond the last it is the last.
import type { Curve, Schemas } from "../api/client.ts";

export interface SizePoint {
  ram: number;
  /** Bytes that eviction would have written to the overflow. */
  written: number;
  /** Bytes that requests would have read from the overflow. */
  read: number;
}

/** A curve, or the sum over several disks that have the same limit each. */
export interface Sizing {
  machines: number;
  points: SizePoint[];
  /** Bytes that guests have written. */
  writtenBytes: number;
  /** Smallest limit at which nothing overflows; of several disks, the largest. */
  zeroBytes: number;
  /** Smallest limit that absorbs the goal; of several disks, the largest. */
  goalBytes: number;
  /** Limit above which more RAM brings little; null if no curve has a bend. */
  kneeBytes: number | null;
  /** Age of the youngest curve, in seconds. */
  seconds: number;
  /** One block in this many was counted. */
  sampledOneIn: number;
}

/** The unit of a disk's counts. */
const BLOCK_BYTES = 4096;

export function at(points: SizePoint[], ram: number): { written: number; read: number } {
  const after = points.findIndex((p) => p.ram >= ram);
  const last = points.at(-1);
  if (after < 0) return { written: last?.written ?? 0, read: last?.read ?? 0 };
  const b = points[after] as SizePoint;
  const a = points[after - 1];
  if (!a) return { written: b.written, read: b.read };
  const share = (ram - a.ram) / Math.max(1, b.ram - a.ram);
  return {
    written: a.written - Math.max(0, a.written - b.written) * share,
    read: a.read - Math.max(0, a.read - b.read) * share,
  };
}

function pointsOf(curve: Curve["curve"]): SizePoint[] {
  return curve.map((p) => ({
    ram: p.ram_bytes,
    written: p.overflow_write_bytes,
    read: p.overflow_read_bytes,
  }));
}

/** What a curve of one disk and the sum of a catalog's curves have in common. */
function sizingOf(
  curve: Curve | Schemas["CatalogCurve"],
  of: Pick<Sizing, "machines" | "writtenBytes">,
): Sizing {
  return {
    ...of,
    points: pointsOf(curve.curve),
    zeroBytes: curve.zero_overflow_bytes,
    goalBytes: curve.recommended_bytes,
    kneeBytes: curve.knee_bytes ?? null,
    seconds: curve.seconds,
    sampledOneIn: curve.sampled_one_in,
  };
}

/** The curve of one disk. */
export function ofDisk(curve: Curve): Sizing {
  return sizingOf(curve, { machines: 1, writtenBytes: curve.totals.written_blocks * BLOCK_BYTES });
}

/** The sum of a catalog's curves, as the daemon adds them. */
export function ofCatalog(curve: Schemas["CatalogCurve"]): Sizing {
  return sizingOf(curve, { machines: curve.disks, writtenBytes: curve.written_bytes });
}

/** Share of the written bytes that a limit absorbs, from 0 to 1; null before anything was written. */
export function absorbed(sizing: Sizing, ram: number): number | null {
  if (sizing.writtenBytes === 0) return null;
  return Math.max(0, 1 - at(sizing.points, ram).written / sizing.writtenBytes);
}

/** Steps and end of a slider that shows everything of interest. */
export function scale(sizing: Sizing, limit: number): { step: number; max: number } {
  const most = Math.max(sizing.zeroBytes * 1.2, limit * 1.5, 1024 * 1024);
  const step = 2 ** Math.max(16, Math.floor(Math.log2(most / 128)));
  return { step, max: Math.ceil(most / step) * step };
}

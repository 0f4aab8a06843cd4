// The library that draws charts: a file of its own, which is loaded when a page first shows a chart.
//
// Invariant: what could not be loaded is loaded again when somebody asks for it, not by itself.
import { signal } from "@preact/signals";
import type uPlot from "uplot";
import { loadFile } from "../state/load-file.ts";

export type PlotLibrary = { is: "none" | "loading" | "failed" } | { is: "loaded"; of: typeof uPlot };
export type Import = (address: string) => Promise<{ default: typeof uPlot }>;

export const plotLibrary = signal<PlotLibrary>({ is: "none" });

/** Loads it, unless it is loaded or being loaded. */
export async function loadPlotLibrary(load?: Import): Promise<void> {
  const { is } = plotLibrary.peek();
  if (is === "loaded" || is === "loading") return;
  plotLibrary.value = { is: "loading" };
  try {
    plotLibrary.value = { is: "loaded", of: (await loadFile("chart.js", load)).default };
  } catch {
    plotLibrary.value = { is: "failed" };
  }
}

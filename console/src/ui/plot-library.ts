// The library that draws charts: a file of its own, which is loaded when a page first shows a chart.
//
// Invariant: what could not be loaded is loaded again when somebody asks for it, not by itself.
import { signal } from "@preact/signals";
import type uPlot from "uplot";

export type PlotLibrary = { is: "none" | "loading" | "failed" } | { is: "loaded"; of: typeof uPlot };
export type Import = (address: string) => Promise<{ default: typeof uPlot }>;

export const plotLibrary = signal<PlotLibrary>({ is: "none" });
let failures = 0;

/** Loads it, unless it is loaded or being loaded. */
export async function loadPlotLibrary(load: Import = (address) => import(address)): Promise<void> {
  const { is } = plotLibrary.peek();
  if (is === "loaded" || is === "loading") return;
  plotLibrary.value = { is: "loading" };
  // Browsers keep the failure of an address for as long as the page lives, so the next attempt has another one.
  const address = new URL(failures ? `chart.js?again=${failures}` : "chart.js", document.baseURI).href;
  try {
    plotLibrary.value = { is: "loaded", of: (await load(address)).default };
  } catch {
    failures++;
    plotLibrary.value = { is: "failed" };
  }
}

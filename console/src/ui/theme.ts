// Light or dark: what the system prefers, or what is chosen in Cockpit around this page, unless somebody chose here. The choice is the
// only thing that the console stores.
import { signal } from "@preact/signals";

export type Theme = "system" | "light" | "dark";
const KEY = "spillway-theme";
/** Where Cockpit keeps the choice of its users. */
const COCKPIT_KEY = "shell:style";

function stored(key: string): Theme {
  try {
    const value = localStorage.getItem(key);
    return value === "light" || value === "dark" ? value : "system";
  } catch {
    return "system";
  }
}

export const theme = signal<Theme>(stored(KEY));
/** Changes whenever colours may have changed. */
export const colours = signal(0);

function apply(): void {
  const value = theme.value === "system" ? stored(COCKPIT_KEY) : theme.value;
  if (value === "system") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = value;
  colours.value = colours.peek() + 1;
}
theme.subscribe(apply);
// Cockpit's choice has changed.
addEventListener("storage", apply);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours.value++;
});

export function choose(value: Theme): void {
  theme.value = value;
  try {
    if (value === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, value);
  } catch {
    // Without storage the choice lasts as long as the page.
  }
}

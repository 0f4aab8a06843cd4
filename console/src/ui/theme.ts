// Light or dark: what the system prefers, unless somebody chose. The choice is the only thing that the console stores.
import { signal } from "@preact/signals";

export type Theme = "system" | "light" | "dark";
const KEY = "spillway-theme";

function stored(): Theme {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : "system";
  } catch {
    return "system";
  }
}

export const theme = signal<Theme>(stored());
/** Changes whenever colours may have changed. */
export const colours = signal(0);

theme.subscribe((value) => {
  if (value === "system") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = value;
  colours.value = colours.peek() + 1;
});
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

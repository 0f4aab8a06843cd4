// The library that draws charts, in a file of its own: it is loaded when a page first shows a chart.
export { default } from "uplot";

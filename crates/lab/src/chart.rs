//! Line charts as SVG, for results that are kept beside their figures.
//!
//! Owns the drawing and knows nothing of what is drawn. Invariant: no figure lies outside its panel, and what cannot
//! be placed (no number, or none above 0 on a logarithmic axis) is left out, never drawn elsewhere.

use crate::markup::{escaped, plain};
use std::fmt::Write;

/// A sheet of panels, two in a row, with notes under them.
pub struct Sheet {
    /// Over everything.
    pub title: String,
    /// Under the title.
    pub subtitle: Vec<String>,
    /// The charts. All name their series alike.
    pub panels: Vec<Panel>,
    /// Under the charts; long ones are broken.
    pub notes: Vec<String>,
}

/// How values are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// From 0 on.
    Linear,
    /// By powers of ten.
    Log,
}

/// One chart.
pub struct Panel {
    /// What it shows, and which way is better.
    pub title: String,
    /// What lies along the bottom.
    pub x_label: String,
    /// A vertical mark, and what it says.
    pub mark: Option<(f64, String)>,
    /// How values are placed.
    pub scale: Scale,
    /// How a value is written at the axis.
    pub write: fn(f64) -> String,
    /// The lines, each in the colour of its place in the list.
    pub series: Vec<Series>,
}

/// One line.
pub struct Series {
    /// Its name.
    pub name: String,
    /// Its figures, by growing x.
    pub dots: Vec<Dot>,
}

/// One figure with its spread.
#[derive(Clone, Copy, Debug)]
pub struct Dot {
    /// Where.
    pub x: f64,
    /// The figure.
    pub y: f64,
    /// The lowest of its runs.
    pub low: f64,
    /// The highest.
    pub high: f64,
}

const WIDTH: f64 = 1080.0;
const PANEL_WIDTH: f64 = 520.0;
const PANEL_HEIGHT: f64 = 300.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 44.0;
const LINE: f64 = 17.0;
const MARGIN: f64 = 20.0;
/// Characters in a line of the notes.
const NOTE_CHARS: usize = 150;
/// Told apart by people who do not see all colours, too (Okabe and Ito).
const COLOURS: [&str; 5] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#555555"];

impl Sheet {
    /// Draws it.
    pub fn svg(&self) -> String {
        let notes: Vec<String> = self.notes.iter().flat_map(|note| broken(note)).collect();
        let head = 40.0 + LINE * self.subtitle.len() as f64;
        let legend = head + 8.0;
        let charts = legend + 22.0;
        let rows = self.panels.len().div_ceil(2) as f64;
        let foot = charts + rows * PANEL_HEIGHT + 14.0;
        let height = foot + LINE * notes.len() as f64 + MARGIN;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
        );
        text(&mut out, (MARGIN, 30.0), "font-size=\"19\" font-weight=\"bold\"", &self.title);
        for (i, line) in self.subtitle.iter().enumerate() {
            text(&mut out, (MARGIN, 50.0 + LINE * i as f64), "fill=\"#444444\"", line);
        }
        let mut x = MARGIN;
        for (i, name) in self.names().into_iter().enumerate() {
            let y = legend + 4.0;
            put(
                &mut out,
                format_args!("<path d=\"M{x} {y}h26\" stroke=\"{}\" stroke-width=\"3\"/>", colour(i)),
            );
            text(&mut out, (x + 32.0, y + 4.0), "", name);
            x += 60.0 + 7.0 * name.chars().count() as f64;
        }
        for (i, panel) in self.panels.iter().enumerate() {
            let at = (MARGIN + (i % 2) as f64 * PANEL_WIDTH, charts + (i / 2) as f64 * PANEL_HEIGHT);
            panel.draw(&mut out, at);
        }
        for (i, line) in notes.iter().enumerate() {
            text(&mut out, (MARGIN, foot + LINE * (i + 1) as f64), "fill=\"#444444\"", line);
        }
        out.push_str("</svg>\n");
        out
    }

    fn names(&self) -> Vec<&str> {
        self.panels.first().map_or_else(Vec::new, |p| p.series.iter().map(|s| s.name.as_str()).collect())
    }
}

/// Values to places within one panel.
struct Frame {
    x: (f64, f64),
    y: (f64, f64),
    scale: Scale,
    at: (f64, f64),
}

impl Frame {
    fn x(&self, x: f64) -> f64 {
        let share = (x - self.x.0) / (self.x.1 - self.x.0);
        self.at.0 + LEFT + share * (PANEL_WIDTH - LEFT - RIGHT)
    }

    /// `None` where the value has no place.
    fn y(&self, y: f64) -> Option<f64> {
        let (low, high) = self.y;
        let share = match self.scale {
            Scale::Linear => (y - low) / (high - low),
            Scale::Log => (y / low).log10() / (high / low).log10(),
        };
        let inside = (-1e-9..=1.0 + 1e-9).contains(&share);
        inside.then_some(self.at.1 + TOP + (1.0 - share) * (PANEL_HEIGHT - TOP - BOTTOM))
    }
}

impl Panel {
    fn frame(&self, at: (f64, f64)) -> Frame {
        let dots = || self.series.iter().flat_map(|s| &s.dots);
        let fits = |v: &f64| v.is_finite() && (self.scale == Scale::Linear || *v > 0.0);
        let least = |values: &mut dyn Iterator<Item = f64>| values.filter(fits).fold(f64::INFINITY, f64::min);
        let most = |values: &mut dyn Iterator<Item = f64>| values.filter(fits).fold(0.0, f64::max);
        let y = match self.scale {
            Scale::Linear => (0.0, round_up(most(&mut dots().map(|d| d.high)))),
            Scale::Log => {
                let (low, high) = (least(&mut dots().map(|d| d.low)), most(&mut dots().map(|d| d.high)));
                if low <= high {
                    let (low, high) = (low.log10().floor(), high.log10().ceil());
                    (10f64.powf(low), 10f64.powf(high.max(low + 1.0)))
                } else {
                    (1.0, 10.0)
                }
            }
        };
        let right = most(&mut dots().map(|d| d.x));
        Frame { x: (0.0, if right > 0.0 { right * 1.04 } else { 1.0 }), y, scale: self.scale, at }
    }

    /// Where the axis has lines.
    fn ticks(frame: &Frame) -> Vec<f64> {
        let (low, high) = frame.y;
        match frame.scale {
            Scale::Linear => (0..=4).map(|i| high * f64::from(i) / 4.0).collect(),
            Scale::Log => {
                let decades = (high / low).log10().round() as i32;
                (0..=decades).map(|i| low * 10f64.powi(i)).collect()
            }
        }
    }

    fn draw(&self, out: &mut String, at: (f64, f64)) {
        let frame = self.frame(at);
        let (left, right) = (at.0 + LEFT, at.0 + PANEL_WIDTH - RIGHT);
        let (top, bottom) = (at.1 + TOP, at.1 + PANEL_HEIGHT - BOTTOM);
        text(out, (left, top - 10.0), "font-weight=\"bold\"", &self.title);
        for tick in Panel::ticks(&frame) {
            let Some(y) = frame.y(tick) else { continue };
            put(out, format_args!("<path d=\"M{left:.1} {y:.1}H{right:.1}\" stroke=\"#dddddd\"/>"));
            text(out, (left - 6.0, y + 4.0), "text-anchor=\"end\" fill=\"#444444\"", &(self.write)(tick));
        }
        for tick in (0..=frame.x.1 as u32).map(f64::from) {
            let x = frame.x(tick);
            put(out, format_args!("<path d=\"M{x:.1} {bottom:.1}v5\" stroke=\"#444444\"/>"));
            text(out, (x, bottom + 18.0), "text-anchor=\"middle\" fill=\"#444444\"", &tick.to_string());
        }
        put(out, format_args!("<path d=\"M{left:.1} {bottom:.1}H{right:.1}\" stroke=\"#444444\"/>"));
        let middle = (left + right) / 2.0;
        text(out, (middle, bottom + 35.0), "text-anchor=\"middle\" fill=\"#444444\"", &self.x_label);
        if let Some((x, words)) = &self.mark {
            let x = frame.x(*x);
            put(
                out,
                format_args!(
                    "<path d=\"M{x:.1} {top:.1}V{bottom:.1}\" stroke=\"#888888\" stroke-dasharray=\"4 3\"/>"
                ),
            );
            text(out, (x + 5.0, top + 12.0), "fill=\"#666666\" font-size=\"11\"", words);
        }
        for (i, series) in self.series.iter().enumerate() {
            series.draw(out, &frame, colour(i));
        }
    }
}

impl Series {
    fn draw(&self, out: &mut String, frame: &Frame, colour: &str) {
        let mut line = String::new();
        for dot in &self.dots {
            let Some(y) = frame.y(dot.y) else { continue };
            let x = frame.x(dot.x);
            put(out, format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"));
            if let (Some(low), Some(high)) = (frame.y(dot.low), frame.y(dot.high)) {
                put(
                    out,
                    format_args!(
                        "<path d=\"M{x:.1} {low:.1}V{high:.1}\" stroke=\"{colour}\" opacity=\"0.5\"/>"
                    ),
                );
            }
            let _ = write!(line, "{}{x:.1} {y:.1}", if line.is_empty() { 'M' } else { 'L' });
        }
        if !line.is_empty() {
            put(
                out,
                format_args!("<path d=\"{line}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"),
            );
        }
    }
}

fn colour(i: usize) -> &'static str {
    COLOURS[i % COLOURS.len()]
}

/// The next number of the form 1, 2, 4 or 8 times a power of ten, at least 1.
fn round_up(most: f64) -> f64 {
    let most = most.max(1.0);
    let decade = 10f64.powf(most.log10().floor());
    [1.0, 2.0, 4.0, 8.0, 10.0].map(|n| n * decade).into_iter().find(|&n| n >= most).unwrap_or(most)
}

fn put(out: &mut String, element: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{element}");
}

fn text(out: &mut String, (x, y): (f64, f64), attributes: &str, words: &str) {
    put(out, format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{}</text>", escaped(&plain(words))));
}

/// Lines of at most [`NOTE_CHARS`], broken between words.
fn broken(note: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in note.split(' ') {
        let last = lines.last().map_or(0, |l| l.chars().count());
        if last > 0 && last + 1 + word.chars().count() > NOTE_CHARS {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(scale: Scale, ys: &[f64]) -> Panel {
        let dots = ys.iter().enumerate().map(|(i, &y)| Dot { x: i as f64, y, low: y * 0.9, high: y * 1.1 });
        Panel {
            title: "IOPS <higher is better>".into(),
            x_label: "working set & RAM".into(),
            mark: Some((1.0, "RAM tier".into())),
            scale,
            write: |v| format!("{v}"),
            series: vec![Series { name: "a \"quoted\" name".into(), dots: dots.collect() }],
        }
    }

    fn attributes<'a>(svg: &'a str, name: &str) -> Vec<&'a str> {
        svg.match_indices(name).filter_map(|(i, _)| svg[i + name.len()..].split('"').next()).collect()
    }

    #[test]
    fn higher_values_lie_higher_and_all_within_the_panel() {
        for scale in [Scale::Linear, Scale::Log] {
            let sheet = Sheet {
                title: "t".into(),
                subtitle: vec![],
                panels: vec![panel(scale, &[1.0, 10.0, 5000.0])],
                notes: vec![],
            };
            let svg = sheet.svg();
            let cy: Vec<f64> = attributes(&svg, "cy=\"").iter().map(|y| y.parse().unwrap()).collect();
            assert_eq!(cy.len(), 3, "{svg}");
            assert!(cy[0] > cy[1] && cy[1] > cy[2], "{cy:?}");
            let top = 70.0 + TOP;
            assert!(cy.iter().all(|y| (top..=top + PANEL_HEIGHT - TOP - BOTTOM).contains(y)), "{cy:?}");
        }
    }

    #[test]
    fn what_has_no_place_is_left_out() {
        for (scale, ys, drawn) in [
            (Scale::Log, vec![0.0, f64::NAN, f64::INFINITY, 10.0], 1),
            (Scale::Linear, vec![0.0, f64::NAN, f64::INFINITY, 10.0], 2),
            (Scale::Log, vec![], 0),
            (Scale::Linear, vec![], 0),
        ] {
            let mut svg = String::new();
            panel(scale, &ys).draw(&mut svg, (0.0, 0.0));
            assert_eq!(svg.matches("<circle").count(), drawn, "{scale:?} {ys:?}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn words_cannot_break_out_of_their_element() {
        let sheet = Sheet {
            title: "</text><script>".into(),
            subtitle: vec!["a & b".into()],
            panels: vec![panel(Scale::Linear, &[1.0])],
            notes: vec!["x".repeat(9), "word ".repeat(80)],
        };
        let svg = sheet.svg();
        assert!(!svg.contains("<script") && svg.contains("a &amp; b") && svg.contains("&quot;quoted&quot;"));
        // Each element is closed in itself or by its own end.
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        assert_eq!(svg.matches('<').count(), svg.matches('>').count());
    }

    #[test]
    fn long_notes_are_broken_between_words() {
        let note = "word ".repeat(80);
        let lines = broken(note.trim_end());
        assert!(lines.len() > 1 && lines.iter().all(|l| l.chars().count() <= NOTE_CHARS));
        assert_eq!(lines.join(" "), note.trim_end());
    }

    #[test]
    fn an_axis_ends_at_a_round_number() {
        assert_eq!([0.0, 0.3, 1.0, 3.7, 8.1, 41.0].map(round_up), [1.0, 1.0, 1.0, 4.0, 10.0, 80.0]);
    }
}

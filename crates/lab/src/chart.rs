//! Line charts of benchmarks, as SVG files that are kept beside their figures.
//!
//! Owns the layout of a sheet and knows nothing of what is drawn. Invariant: no figure lies outside its panel, and a value that cannot
//! be placed (no number, or none above 0 on a logarithmic axis) is left out, never drawn elsewhere.

use crate::markup::plain;
use crate::picture::{Area, Axis, CHARACTER, Picture, Role, cut, draw_point, draw_text};
use anyhow::Result;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

/// A sheet of panels, two in a row, with notes under them.
pub struct Sheet {
    /// Over everything.
    pub title: String,
    /// Lines under the title.
    pub subtitle: Vec<String>,
    /// The charts. All name their series alike.
    pub panels: Vec<Panel>,
    /// Under the charts; long notes are broken into lines.
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
    /// Where a vertical line stands, and the text beside it.
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
    /// Place along the bottom.
    pub x: f64,
    /// The figure.
    pub y: f64,
    /// The lowest of its runs.
    pub low: f64,
    /// The highest of its runs.
    pub high: f64,
}

const WIDTH: i32 = 2104;
const MARGIN: i32 = 12;
const PANEL_WIDTH: i32 = 1040;
const PANEL_HEIGHT: i32 = 600;
/// Height of a line of text.
const LINE: i32 = 36;
/// Characters in a line of the notes.
const NOTE_CHARS: usize = 150;

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

impl Sheet {
    /// Draws it, as an SVG file.
    pub fn svg(&self) -> Result<String> {
        let notes: Vec<String> = self.notes.iter().flat_map(|note| broken(note)).collect();
        let legend = LINE * self.subtitle.len() as i32 + LINE / 2;
        let charts = legend + 2 * LINE;
        let foot = charts + PANEL_HEIGHT * self.panels.len().div_ceil(2) as i32 + LINE / 2;
        let height = foot + LINE * notes.len() as i32 + MARGIN;
        let text = |area: &Area, text: &str, at, role| draw_text(area, &plain(text), at, role, HPos::Left);
        let picture = Picture::draw(&plain(&self.title), (WIDTH as u32, height as u32), |area| {
            for (line, i) in self.subtitle.iter().zip(0..) {
                text(area, line, (MARGIN, LINE * i + LINE / 2), Role::Soft)?;
            }
            let mut x = MARGIN;
            for (place, name) in self.names().into_iter().enumerate() {
                let y = legend + LINE;
                let stroke = Role::Series(place).colour().stroke_width(5);
                area.draw(&PathElement::new(vec![(x, y), (x + 56, y)], stroke))?;
                draw_point(area, (x + 28, y), place)?;
                text(area, name, (x + 68, y), Role::Ink)?;
                x += 120 + CHARACTER * name.chars().count() as i32;
            }
            for (panel, i) in self.panels.iter().zip(0..) {
                let at = (MARGIN + i % 2 * PANEL_WIDTH, charts + i / 2 * PANEL_HEIGHT);
                let rest = area.clone().shrink(at, (PANEL_WIDTH as u32, PANEL_HEIGHT as u32));
                panel.draw(&rest)?;
            }
            for (line, i) in notes.iter().zip(1..) {
                text(area, line, (MARGIN, foot + LINE * i), Role::Soft)?;
            }
            Ok(())
        })?;
        picture.file()
    }

    fn names(&self) -> Vec<&str> {
        self.panels.first().map_or_else(Vec::new, |p| p.series.iter().map(|s| s.name.as_str()).collect())
    }
}

impl Panel {
    fn draw(&self, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<()> {
        let axis = self.axis();
        let (low, high) = axis.ends();
        let right = self.dots().map(|dot| dot.x).filter(|x| x.is_finite()).fold(0.0, f64::max);
        let right = if right > 0.0 { right * 1.04 } else { 1.0 };
        let labels: Vec<String> =
            axis.marks().iter().map(|mark| plain(&(self.write)(axis.value(*mark)))).collect();
        let widest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(1) as i32;
        let chart = ChartBuilder::on(area)
            .margin_top(64)
            .margin_right(34)
            .margin_left(widest * CHARACTER + 26)
            .margin_bottom(92)
            .build_cartesian_2d(0.0..right, low..high)?;
        let at = |x, y| in_area(area, &chart, (x, y));
        let title = cut(&plain(&self.title), (PANEL_WIDTH / CHARACTER) as usize);
        draw_text(area, &title, (0, 32), Role::Ink, HPos::Left)?;
        let grid = Role::Grid.colour().stroke_width(2);
        for (mark, label) in axis.marks().iter().zip(&labels) {
            let from = at(0.0, *mark);
            area.draw(&PathElement::new(vec![from, at(right, *mark)], grid))?;
            draw_text(area, label, (from.0 - 14, from.1), Role::Soft, HPos::Right)?;
        }
        for mark in (0..=right as u32).map(f64::from) {
            let (x, y) = at(mark, low);
            area.draw(&PathElement::new(vec![(x, y), (x, y + 10)], grid))?;
            draw_text(area, &mark.to_string(), (x, y + 28), Role::Soft, HPos::Center)?;
        }
        let (x, y) = at(right / 2.0, low);
        draw_text(area, &plain(&self.x_label), (x, y + 66), Role::Soft, HPos::Center)?;
        if let Some((x, text)) = &self.mark {
            let ends = [at(*x, high), at(*x, low)];
            let stroke = Role::Soft.colour().stroke_width(2);
            area.draw(&plotters::element::DashedPathElement::new(ends, 8, 6, stroke))?;
            draw_text(area, &plain(text), (ends[0].0 + 10, ends[0].1 + 18), Role::Soft, HPos::Left)?;
        }
        for (place, series) in self.series.iter().enumerate() {
            series.draw(area, &axis, place, &at)?;
        }
        Ok(())
    }

    fn dots(&self) -> impl Iterator<Item = &Dot> {
        self.series.iter().flat_map(|series| &series.dots)
    }

    fn axis(&self) -> Axis {
        let most = self.dots().map(|dot| dot.high).filter(|high| high.is_finite()).fold(0.0, f64::max);
        let low = self.dots().map(|dot| dot.low).filter(|low| low.is_finite() && *low > 0.0);
        match self.scale {
            Scale::Linear => Axis::linear(most),
            Scale::Log => match low.fold(f64::INFINITY, f64::min) {
                least if least <= most => Axis::log(least, most),
                _ => Axis::log(1.0, 10.0),
            },
        }
    }
}

/// A place of a chart in the coordinates of the area that it is drawn on: the chart itself counts from the picture's corner.
fn in_area(area: &Area, chart: &Chart, at: (f64, f64)) -> (i32, i32) {
    let (x, y) = chart.backend_coord(&at);
    let (left, top) = area.get_base_pixel();
    (x - left, y - top)
}

impl Series {
    fn draw(
        &self,
        area: &Area,
        axis: &Axis,
        place: usize,
        at: &dyn Fn(f64, f64) -> (i32, i32),
    ) -> Result<()> {
        let colour = Role::Series(place).colour();
        let dots: Vec<&Dot> = self.dots.iter().filter(|dot| dot.x.is_finite() && axis.has(dot.y)).collect();
        for dot in &dots {
            if axis.has(dot.low) && axis.has(dot.high) {
                let ends = [dot.low, dot.high].map(|value| at(dot.x, axis.place(value)));
                area.draw(&PathElement::new(ends, colour.stroke_width(2)))?;
            }
        }
        let places: Vec<(i32, i32)> = dots.iter().map(|dot| at(dot.x, axis.place(dot.y))).collect();
        area.draw(&PathElement::new(places.clone(), colour.stroke_width(4)))?;
        places.into_iter().try_for_each(|place_of_dot| draw_point(area, place_of_dot, place))
    }
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

    fn sheet(panel: Panel) -> Sheet {
        Sheet { title: "t".into(), subtitle: vec![], panels: vec![panel], notes: vec![] }
    }

    /// Places of the first series' points: circles, as the first form is.
    fn points(svg: &str) -> Vec<(f64, f64)> {
        let value = |element: &str, name: &str| {
            element.split_once(name).unwrap().1.split('"').next().unwrap().parse().unwrap()
        };
        let circles = svg.lines().filter(|line| line.starts_with("<circle"));
        // The first stands in the legend.
        circles.skip(1).map(|line| (value(line, "cx=\""), value(line, "cy=\""))).collect()
    }

    #[test]
    fn higher_values_lie_higher_and_all_within_the_panel() {
        for scale in [Scale::Linear, Scale::Log] {
            let svg = sheet(panel(scale, &[1.0, 10.0, 5000.0])).svg().unwrap();
            let points = points(&svg);
            assert_eq!(points.len(), 3, "{svg}");
            assert!(points[0].1 >= points[1].1 && points[1].1 > points[2].1, "{points:?}");
            assert!(points[0].0 < points[1].0 && points[1].0 < points[2].0, "{points:?}");
            let (x, y) = (0.0..f64::from(PANEL_WIDTH), 90.0..f64::from(90 + PANEL_HEIGHT));
            assert!(points.iter().all(|at| x.contains(&at.0) && y.contains(&at.1)), "{points:?}");
        }
    }

    #[test]
    fn panels_stand_side_by_side() {
        let mut both = sheet(panel(Scale::Linear, &[1.0]));
        both.panels.push(panel(Scale::Linear, &[1.0]));
        let points = points(&both.svg().unwrap());
        assert_eq!((points[1].0 - points[0].0, points[1].1 - points[0].1), (f64::from(PANEL_WIDTH), 0.0));
    }

    #[test]
    fn values_that_have_no_place_are_left_out() {
        for (scale, ys, drawn) in [
            (Scale::Log, vec![0.0, f64::NAN, f64::INFINITY, 10.0], 1),
            (Scale::Linear, vec![0.0, f64::NAN, f64::INFINITY, 10.0], 2),
            (Scale::Log, vec![], 0),
            (Scale::Linear, vec![], 0),
        ] {
            let svg = sheet(panel(scale, &ys)).svg().unwrap();
            assert_eq!(points(&svg).len(), drawn, "{scale:?} {ys:?}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn text_cannot_break_out_of_its_element() {
        let sheet = Sheet {
            title: "</text><script>".into(),
            subtitle: vec!["a & b".into()],
            panels: vec![panel(Scale::Linear, &[1.0])],
            notes: vec!["x".repeat(9), "word ".repeat(80)],
        };
        let svg = sheet.svg().unwrap();
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
}

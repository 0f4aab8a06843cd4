//! Bars: each scenario's value, written over it, with the spread of its runs.
//!
//! Invariant: all bars of a picture begin at 0 and have one scale.

use crate::numbers::{tick, ticks};
use crate::picture::{Area, CHARACTER, Picture, Role, TEXT, cut, draw_text};
use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

const ROW: i32 = 88;
const LEFT: i32 = 8;

/// As wide as a picture over time, or as one of many side by side.
fn width(axis: Option<&str>) -> u32 {
    if axis.is_some() { 1000 } else { 700 }
}

/// One scenario.
pub struct Bar {
    /// Its name.
    pub name: String,
    /// Its place in the study.
    pub place: usize,
    /// How long; none where nothing is known.
    pub value: Option<f64>,
    /// The lowest and the highest run, where there are several.
    pub spread: Option<(f64, f64)>,
    /// The value in words.
    pub words: String,
}

/// Draws them, with an axis in a unit or without one.
pub fn draw(label: &str, head: Option<&str>, axis: Option<&str>, bars: &[Bar]) -> Result<Picture> {
    let top = if head.is_some() { 48 } else { 4 };
    let bottom = top + ROW * bars.len() as i32;
    let (width, height) = (width(axis), (bottom + if axis.is_some() { 74 } else { 8 }) as u32);
    let reach = |bar: &Bar| bar.spread.map_or(0.0, |(_, high)| high).max(bar.value.unwrap_or(0.0));
    let most = bars.iter().map(reach).fold(0.0, f64::max);
    let marks = ticks(most);
    let (step, end) = (marks[1], marks[marks.len() - 1]);
    // Bars reach to the right edge; marks stand as far as they do.
    let end = if most > 0.0 { most } else { end };
    let space = width as i32 - LEFT - 44;
    let x = |value: f64| LEFT + (f64::from(space) * (value / end).clamp(0.0, 1.0)).round() as i32;
    Picture::draw(label, (width, height), |root| {
        if let Some(head) = head {
            let most = (width as i32 / CHARACTER) as usize;
            draw_text(root, &cut(head, most), (LEFT, 22), Role::Ink, HPos::Left)?;
        }
        let grid = Role::Grid.colour().stroke_width(2);
        for &mark in marks.iter().filter(|mark| axis.is_some() && **mark <= end) {
            for row in 0..bars.len() as i32 {
                let row = top + ROW * row;
                root.draw(&PathElement::new(vec![(x(mark), row + 40), (x(mark), row + 82)], grid))?;
            }
            let side = if mark == 0.0 { HPos::Left } else { HPos::Center };
            let unit = if axis == Some("%") { "%" } else { "" };
            draw_text(root, &(tick(mark, step) + unit), (x(mark), bottom + 22), Role::Soft, side)?;
        }
        if let Some(axis) = axis.filter(|axis| *axis != "%") {
            draw_text(root, axis, (width as i32 / 2, bottom + 56), Role::Soft, HPos::Center)?;
        }
        for (i, bar) in bars.iter().enumerate() {
            draw_bar(root, bar, width as i32, top + ROW * i as i32, &x)?;
        }
        let base = Role::Soft.colour().stroke_width(2);
        root.draw(&PathElement::new(vec![(LEFT, top + 4), (LEFT, bottom)], base))?;
        Ok(())
    })
}

fn draw_bar(root: &Area, bar: &Bar, width: i32, top: i32, x: &dyn Fn(f64) -> i32) -> Result<()> {
    let middle = top + TEXT as i32 / 2 + 10;
    let characters = width / CHARACTER - 3;
    let value = cut(&bar.words, (characters - 12).max(8) as usize);
    let name = cut(&bar.name, (characters as usize).saturating_sub(value.chars().count()));
    draw_text(root, &name, (LEFT + 8, middle), Role::Ink, HPos::Left)?;
    draw_text(root, &value, (width - 8, middle), Role::Ink, HPos::Right)?;
    let (from, to) = (top + 44, top + 78);
    let Some(length) = bar.value else { return Ok(()) };
    let colour = Role::Series(bar.place).colour().filled();
    root.draw(&Rectangle::new([(LEFT, from), (x(length).max(LEFT + 2), to)], colour))?;
    if let Some((low, high)) = bar.spread.filter(|(low, high)| low < high) {
        let ink = Role::Ink.colour().stroke_width(3);
        let y = (from + to) / 2;
        for path in [
            vec![(x(low), y), (x(high), y)],
            vec![(x(low), y - 8), (x(low), y + 8)],
            vec![(x(high), y - 8), (x(high), y + 8)],
        ] {
            root.draw(&PathElement::new(path, ink))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(value: Option<f64>, spread: Option<(f64, f64)>) -> Bar {
        Bar { name: "a </text> b".into(), place: 1, value, spread, words: "100%".into() }
    }

    fn widths(svg: &str) -> Vec<i32> {
        let bars = svg.lines().filter(|line| line.starts_with("<rect"));
        let width = |line: &str| line.split("width=\"").nth(1)?.split('"').next()?.parse().ok();
        bars.filter_map(width).collect()
    }

    #[test]
    fn bars_are_as_long_as_their_values_and_stay_inside() {
        let bars = [bar(Some(100.0), None), bar(Some(50.0), Some((40.0, 60.0))), bar(None, None)];
        let svg = draw("t", Some("h"), Some("%"), &bars).unwrap().body;
        let widths = widths(&svg);
        assert_eq!(widths.len(), 2, "{svg}");
        assert!((widths[0] - 2 * widths[1]).abs() <= 1 && widths[0] < 1000, "{widths:?}");
        assert!(svg.contains("a &lt;/text&gt; b") && !svg.contains("NaN"));
    }

    #[test]
    fn nothing_to_show_is_no_panic() {
        for value in [Some(0.0), Some(1e20), Some(1e-9), None] {
            for axis in [None, Some("%"), Some("reads")] {
                draw("t", Some("h"), axis, &[bar(value, None)]).unwrap();
            }
        }
        draw("t", Some("h"), None, &[]).unwrap();
    }
}

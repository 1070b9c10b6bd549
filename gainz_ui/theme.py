"""How the page looks: a built-in theme on system fonts, and one style sheet. Nothing is loaded from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def theme() -> Any:
    import gradio as gr
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", "sans-serif"]
    base = gr.themes.Base(primary_hue="indigo", neutral_hue="slate", radius_size="md", font=fonts,
                          font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"])
    return base.set(
        body_background_fill="*neutral_100", body_background_fill_dark="*neutral_950",
        body_text_color_subdued="*neutral_600", body_text_color_subdued_dark="*neutral_400",
        block_background_fill="white", block_background_fill_dark="*neutral_900",
        block_border_width="0px", block_shadow="none", block_label_text_color="*neutral_600",
        block_label_text_color_dark="*neutral_300",
        block_title_text_color="*neutral_800", block_title_text_color_dark="*neutral_200",
        block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_400",
        panel_background_fill="transparent", panel_background_fill_dark="transparent", panel_border_width="0px",
        input_background_fill="white", input_background_fill_dark="*neutral_950", input_border_width="1px",
        input_border_color="*neutral_300", input_border_color_dark="*neutral_700",
        input_border_color_focus="*primary_500", input_border_color_focus_dark="*primary_400",
        input_placeholder_color="*neutral_500", input_placeholder_color_dark="*neutral_400",
        button_primary_background_fill="*primary_600", button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600", button_primary_background_fill_hover_dark="*primary_700",
        button_primary_text_color="white", button_primary_text_color_dark="white",
        button_secondary_background_fill="white", button_secondary_background_fill_hover="*neutral_100",
        button_secondary_background_fill_dark="*neutral_800", button_secondary_background_fill_hover_dark="*neutral_700",
        button_secondary_border_color="*neutral_300", button_secondary_border_color_dark="*neutral_600",
        button_secondary_text_color="*neutral_800", button_secondary_text_color_dark="*neutral_100",
        button_border_width="1px", button_large_padding="8px 18px", button_small_padding="5px 12px",
        button_large_text_size="*text_md", button_large_text_weight="600", button_transition="background-color .15s",
        checkbox_background_color_selected="*primary_600", slider_color="*primary_600",
        accordion_text_color="*neutral_800", accordion_text_color_dark="*neutral_200",
    )


def style() -> str:
    return (Path(__file__).parent / "style.css").read_text(encoding="utf-8")

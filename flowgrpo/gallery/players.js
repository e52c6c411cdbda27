
// Videos play without sound while they are in view. A video that a person has stopped stays stopped.
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const watched = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!target.isConnected) watched.unobserve(target);
    else if (isIntersecting && target.wanted) target.play().catch(() => { target.wanted = false; });
    else if (!isIntersecting && !target.paused) {
      target.wanted = true;
      target.leaving = true;
      target.pause();
    }
  }
}, { rootMargin: "80px" });

// The video of a sample. If it cannot be played, its first frame is shown.
function player(cell, alt, controls) {
  const poster = thumbOf(cell);
  const video = el("video", { loop: true, muted: true, playsinline: true, controls, preload: "metadata", poster,
    "aria-label": `Video. ${alt}`, src: videoOf(cell) });
  video.muted = true; // the attribute alone does not silence an element that a script has made
  video.wanted = !calm.matches;
  video.addEventListener("play", () => { video.wanted = true; });
  video.addEventListener("pause", () => {
    if (!video.leaving) video.wanted = false;
    video.leaving = false;
  });
  video.addEventListener("error", () => {
    if (poster) video.replaceWith(el("img", { alt, src: poster, draggable: "false" }));
    else video.replaceWith(el("span", { class: "absent" }, "the video file is missing"));
  });
  if (poster) {
    const first = new Image();
    first.addEventListener("load", () => video.classList.toggle("pixels", first.naturalWidth <= 160));
    first.src = poster;
  }
  watched.observe(video);
  return video;
}

// Keeps a video at the time of another one, where one lies over the other.
function inStep(leader, other) {
  if (leader.tagName !== "VIDEO" || other.tagName !== "VIDEO") return;
  leader.addEventListener("timeupdate", () => {
    if (Math.abs(leader.currentTime - other.currentTime) > 0.12) other.currentTime = leader.currentTime;
  });
}

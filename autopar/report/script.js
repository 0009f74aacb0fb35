document.querySelectorAll('.autopar-plan:not([data-live])').forEach(page => {
  page.dataset.live = '1';
  const tip = page.appendChild(Object.assign(document.createElement('div'), {className: 'tip'}));
  page.addEventListener('mousemove', event => {
    const over = event.target.closest('rect, circle, [data-tip]');
    const title = over && over.querySelector('title');
    if (title) { over.dataset.tip = title.textContent; title.remove(); }
    const words = over && over.dataset.tip;
    tip.style.display = words ? 'block' : 'none';
    if (!words) return;
    tip.textContent = words;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + 'px';
  });
  page.addEventListener('mouseleave', () => { tip.style.display = 'none'; });
  page.querySelectorAll('.find').forEach(find => find.addEventListener('input', () => {
    const words = find.value.toLowerCase().split(/\s+/);
    find.parentElement.querySelectorAll('.tensors tbody tr').forEach(row => {
      const text = row.textContent.toLowerCase();
      row.style.display = words.every(word => text.includes(word)) ? '' : 'none';
    });
  }));
});
